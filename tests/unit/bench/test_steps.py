"""What the step benchmark makes of its times."""

from __future__ import annotations

from paceline.bench import steps


def test_the_figure_is_the_lower_quartile_of_each_bursts_second_half() -> None:
    """Arms take turns; the first runs of a burst, on cold caches, do not count."""
    order: list[str] = []
    half = steps.BURST // 2
    in_seconds = [100.0, *([9.0] * half), *(1.0 + i for i in range(half))]  # the warm-up comes first

    def arm(name: str) -> steps.Arm:
        left = iter(in_seconds)

        def run() -> float:
            order.append(name)
            return next(left)

        return run

    figures = steps.measure({"a": arm("a"), "b": arm("b")}, seconds=0)
    assert figures == {"a": 1e3 * (1.0 + half // 4), "b": 1e3 * (1.0 + half // 4)}
    assert order == ["a", "b", *["a"] * steps.BURST, *["b"] * steps.BURST]
