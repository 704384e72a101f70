"""What the step benchmark makes of its times."""

from __future__ import annotations

from paceline.bench import steps
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from target_worker.verifier import Verifier
from tests.sim.toys import ToyModel, ToyRunner


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


def test_a_verification_is_a_pass_over_all_its_rows() -> None:
    """Once: the first row was computed ahead, and mostly decided the round alone."""
    vocabulary_size, rounds = 6, 8
    runner = ToyRunner(ToyModel(vocabulary_size, seed=3), num_blocks=200)
    runner.can_stop = True
    config, _ = steps.configs(threads=1)
    verifier = Verifier(runner, config, vocabulary_size=vocabulary_size, max_model_len=800)
    sampling = SamplingParams(temperature=0, seed=3, max_tokens=None)
    params = SequenceParams(sampling, AcceptanceMode.COUPLED, steps.CONTEXTS[0])
    verifying = steps._Rounds(verifier, params, vocabulary_size)
    runner.passes.clear()
    for _ in range(rounds):
        verifying.run()
    assert runner.passes == [steps.K + 1] * rounds
