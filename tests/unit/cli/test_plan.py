"""`paceline plan`: the paper's numbers, as table, plot and JSON."""

from __future__ import annotations

import json

import pytest
from harness.commands import command
from harness.refusals import refused

from paceline.plan import make_plan


def output(*words: str) -> str:
    done = command("plan", *words)
    assert done.returncode == 0
    return done.stdout


@pytest.mark.parametrize(
    ("alpha", "c", "k", "tokens", "speedup"),
    [
        (0.8, 0.05, 4, 3.3616, 3.3616 / 1.2),
        (0.5, 0.0, 2, 1.75, 1.75),
        (0.6, 0.02, 2, 1.96, 1.96 / 1.04),
        (1.0, 0.1, 5, 6.0, 4.0),
        (0.0, 0.5, 2, 1.0, 0.5),
        (0.9, 0.3, 0, 1.0, 1.0),
    ],
)
def test_the_speedup_follows_theorem_3_8(
    alpha: float, c: float, k: int, tokens: float, speedup: float
) -> None:
    plan = make_plan(alpha, c, k)
    assert plan.expected_tokens == pytest.approx(tokens)
    assert plan.speedup == pytest.approx(speedup)
    assert plan.rows[k].speedup == plan.speedup


def test_the_best_k_has_the_highest_speedup() -> None:
    for alpha in (0.1, 0.5, 0.8, 0.95):
        for c in (0.01, 0.05, 0.2, 0.6):
            plan = make_plan(alpha, c, 0)
            assert plan.best_speedup == max(row.speedup for row in plan.rows)
            assert plan.rows[plan.best_k].speedup == plan.best_speedup
            assert plan.improvement_possible == (plan.best_k > 0)


def test_plain_decoding_has_no_overhead() -> None:
    plan = make_plan(0.5, 0.1, 0, overhead=10.0)
    assert (plan.best_k, plan.speedup, plan.rows[0].speedup) == (0, 1.0, 1.0)
    assert plan.rows[4].speedup < 1


def test_lookahead_hides_a_draft_that_is_fast_enough() -> None:
    for row in make_plan(0.7, 0.4, 3, max_k=4).rows[1:]:
        assert row.speedup_with_lookahead == pytest.approx(row.expected_tokens / max(1, 0.4 * row.k))


def test_a_plan_has_the_papers_other_formulas() -> None:
    plan = make_plan(0.8, 0.1, 4, c_hat=0.15)
    assert plan.oracle_bound_with_c == pytest.approx(1 / (0.2 + 0.08))
    assert plan.least_improvement == pytest.approx(1.8 / 1.1)
    assert plan.best_k_with_lookahead == 10
    assert plan.best_speedup_with_lookahead == plan.rows[10].speedup_with_lookahead
    tokens = plan.rows[4].expected_tokens
    assert plan.rows[4].operations == pytest.approx((4 * 0.15 + 5) / tokens)
    assert plan.rows[4].memory == pytest.approx((4 * 0.15 + 1) / tokens)
    assert make_plan(0.1, 0.2, 4).least_improvement is None


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("alpha", {"alpha": -0.1}),
        ("alpha", {"alpha": float("nan")}),
        ("c", {"c": float("inf")}),
        ("c", {"c": -1.0}),
        ("overhead", {"overhead": -1.0}),
        ("row_cost", {"row_cost": float("nan")}),
        ("c_hat", {"c_hat": -0.5}),
        ("k", {"k": -1}),
        ("k", {"k": 33}),
        ("max_k", {"max_k": 0}),
        ("max_k", {"max_k": 33}),
    ],
)
def test_invalid_plan_values_are_refused(field: str, values: dict[str, float]) -> None:
    with refused(field):
        make_plan(**{"alpha": 0.5, "c": 0.1, "k": 2, **values})  # type: ignore[arg-type]


def test_json_holds_the_whole_plan() -> None:
    printed = json.loads(output("--alpha", "0.8", "--c", "0.05", "--k", "4", "--json"))
    expected = make_plan(0.8, 0.05, 4, max_k=16).to_dict()
    assert printed == json.loads(json.dumps(expected))
    assert printed["best_k"] == 8


def test_json_writes_infinity_as_null() -> None:
    printed = json.loads(output("--alpha", "1", "--json"), parse_constant=pytest.fail)
    assert printed["oracle_bound"] is None


def test_the_table_and_the_plot_are_printed() -> None:
    printed = output()
    assert "K = 4: 3.36 tokens per round, 2.80× plain speed" in printed
    assert "best K = 8: 3.09×; with lookahead, K = 16: at most 4.89×" in printed
    assert "upper bound with a K chosen for each round: 4.17×" in printed
    assert "upper bound for a chain of any length: 5.00×" in printed
    assert "← given" in printed
    assert "← best" in printed
    assert "speed-up over K, α = 0.8" in printed
    assert "\x1b" not in printed


def test_a_useless_draft_is_reported() -> None:
    assert "cannot help" in output("--alpha", "0.2", "--c", "0.3")


def test_without_plotext_the_table_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    printed = output()
    assert "pip install plotext" in printed
    assert "← best" in printed
