"""When the target's next pass begins."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from paceline.core.messages import VerifyRound
from paceline.core.types import Proposal
from target_worker.batching_delay import LATE, MANY, STALL, BatchingDelay, PassCost, Usual
from tests.unit.workers.test_target_engine import PROMPT, Worker

STEP, ROW = 20e-3, 0.1e-3


def known(step: float = STEP, row: float = ROW) -> BatchingDelay:
    """Passes of several sizes have been seen."""
    delay = BatchingDelay()
    for rows in (1, 2, 4, 8):
        delay.cost.observe(rows, step + row * rows)
    return delay


def returned(delay: BatchingDelay, seconds: Sequence[float], rounds: int = 3, rows: int = 1) -> float:
    """Each of the sequences takes so long for several rounds, and is away again since the time returned."""
    now = 0.0
    for _ in range(rounds):
        for i, usual in enumerate(seconds):
            delay.answered(f"s{i}", rows, now)
            delay.back(f"s{i}", rows, now + usual)
        now += 1.0
    for i in range(len(seconds)):
        delay.answered(f"s{i}", rows, now)
    return now


def test_a_sequence_returning_soon_is_waited_for() -> None:
    delay = known()
    now = returned(delay, [2e-3, 5e-3])
    assert delay.seconds(1, now) == pytest.approx(5e-3)
    assert delay.seconds(1, now + 1e-3) == pytest.approx(4e-3)


def test_a_returned_sequence_is_not_waited_for() -> None:
    delay = known()
    now = returned(delay, [2e-3, 5e-3])
    delay.back("s1", 1, now + 1e-3)
    assert delay.seconds(2, now + 1e-3) == pytest.approx(1e-3)
    delay.back("s0", 1, now + 2e-3)
    assert delay.seconds(3, now + 2e-3) == 0


@pytest.mark.parametrize("lost", [False, True])
def test_a_lost_sequence_is_not_waited_for_any_longer(lost: bool) -> None:
    delay = known()
    now = returned(delay, [2e-3])
    if lost:
        delay.gone("s0")
    assert delay.seconds(1, now + 2e-3) == 0
    assert (delay.seconds(1, now + 1e-3) == 0) is lost


@pytest.mark.parametrize(("usual", "waited_for"), [(0.5, True), (0.81, True), (0.83, False), (3.0, False)])
def test_only_returns_shorter_than_a_step_are_waited_for(usual: float, waited_for: bool) -> None:
    """Otherwise another group's pass meanwhile is more useful."""
    delay = known(row=0.0)
    now = returned(delay, [usual * STEP])
    assert (delay.seconds(1, now) > 0) is waited_for


def test_the_rest_of_a_long_return_is_not_waited_for() -> None:
    """Otherwise all sequences would leave and return together, and the model would idle."""
    delay = known()
    now = returned(delay, [STEP] * 4)
    assert delay.seconds(4, now + 0.99 * STEP) == 0


def test_nothing_is_waited_for_if_rows_cost_more_than_steps() -> None:
    delay = known(step=1e-3, row=1e-3)
    now = returned(delay, [0.3e-3] * 16, rows=5)
    assert delay.seconds(80, now) == 0
    assert delay.seconds(1, returned(known(step=1e-3, row=1e-6), [0.3e-3])) == 0, "not this one's"


def test_quick_sequences_are_waited_for_but_slow_ones_not() -> None:
    delay = known()
    now = returned(delay, [50e-3, 2e-3, 40e-3])
    assert delay.seconds(1, now) == pytest.approx(2e-3)


def test_nothing_is_waited_for_without_measurements() -> None:
    delay = known()
    delay.answered("new", 1, 0.0)
    assert delay.seconds(1, 0.0) == 0, "how long it takes"
    delay = BatchingDelay()
    now = returned(delay, [1e-3])
    assert delay.seconds(1, now) == 0, "what passes cost"
    delay.cost.observe(4, STEP)
    assert delay.seconds(1, now) == 0, "what a step is of that"


def test_a_sequence_turned_plain_is_waited_for_from_round_two() -> None:
    """And one that begins to draft is not: a common mean would follow after a dozen rounds."""
    delay = known()
    now = returned(delay, [50e-3], rounds=MANY, rows=5)
    assert delay.seconds(1, now) == 0
    delay.back("s0", 1, now + 2e-3)
    delay.answered("s0", 1, now + 1)
    assert delay.seconds(1, now + 1) == pytest.approx(2e-3)
    delay.back("s0", 5, now + 1.05)
    delay.answered("s0", 5, now + 2)
    assert delay.seconds(1, now + 2) == 0


def test_varying_times_get_a_margin() -> None:
    delay = known()
    for i in range(40):
        delay.answered("s", 1, float(i))
        delay.back("s", 1, i + (2e-3 if i % 2 else 4e-3))
    delay.answered("s", 1, 40.0)
    assert delay.seconds(1, 40.0) == pytest.approx(3e-3 + LATE * 1e-3, rel=0.1)


def test_a_clients_pause_hardly_changes_the_usual_return() -> None:
    delay = known()
    now = returned(delay, [2e-3], rounds=MANY)
    delay.back("s0", 1, now + 60)
    delay.answered("s0", 1, now + 60)
    usual = 2e-3 * (1 + (STALL - 1) / 8)
    assert 0 < delay.seconds(1, now + 60) < usual + 2 * LATE * 1e-3


def test_a_passes_cost_is_a_step_plus_its_rows() -> None:
    cost = PassCost()
    assert cost.line() == (0.0, 0.0)
    for rows in (1, 3, 9, 20, 40):
        cost.observe(rows, STEP + ROW * rows)
    assert cost.line() == pytest.approx((STEP, ROW))


@pytest.mark.parametrize(
    ("seconds", "line"),
    [((3e-3, 1e-3), (2e-3, 0.0)), ((1e-3, 9e-3), (0.0, 10e-3 / 5))],
    ids=["rows that save time", "a step of less than nothing"],
)
def test_impossible_costs_are_corrected(seconds: tuple[float, float], line: tuple[float, float]) -> None:
    cost = PassCost()
    cost.observe(1, seconds[0])
    cost.observe(4, seconds[1])
    assert cost.line() == pytest.approx(line)


def test_the_usual_value_follows_observations() -> None:
    usual = Usual(1.0)
    usual.observe(2.0)
    assert usual.mean == 1.5, "the first ones count alike"
    for _ in range(100):
        usual.observe(4.0)
    assert usual.mean == pytest.approx(4.0, rel=0.01)
    assert usual.deviation == pytest.approx(0, abs=0.05)


def test_a_first_observation_of_zero_is_outgrown() -> None:
    usual = Usual(0.0)
    usual.observe(2.0)
    assert usual.mean == 1.0


@pytest.mark.parametrize("waits", [True, False])
def test_a_targets_sequences_share_passes(waits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each begins during another's pass. Without waiting, groups of them would take turns."""
    worker = Worker(max_model_len=400, num_blocks=400)
    forward = worker.runner.forward

    def timed(inputs: Any) -> Any:
        worker.clock.advance(STEP + ROW * len(inputs))
        return forward(inputs)

    monkeypatch.setattr(worker.runner, "forward", timed)
    if not waits:
        monkeypatch.setattr(BatchingDelay, "seconds", lambda *_: 0.0)
    rounds = dict.fromkeys("stuv", 0)
    coming = {name: 4.5 * i * STEP for i, name in enumerate(rounds)}
    for name in rounds:
        worker.open(name)

    def take_up() -> None:
        for name in [name for name, at in coming.items() if at <= worker.clock() + 1e-9]:
            base = len(PROMPT) + rounds[name]
            rounds[name] += 1
            worker.it.handle(VerifyRound(name, 1, rounds[name], base, (), Proposal(())), coming.pop(name))

    while min(rounds.values()) < 30:
        take_up()
        delay = worker.it.batching_delay() if worker.it.has_work else math.inf
        soonest = min(coming.values(), default=math.inf) - worker.clock()
        if (pause := min(delay, soonest)) > 1e-9:
            worker.clock.advance(pause)
        else:
            verdicts = worker.it.step()
            coming |= {verdict.sequence_id: worker.clock() + STEP / 10 for verdict in verdicts}
    assert set(worker.runner.passes[-20:]) == {4 if waits else 2}


def test_a_dropped_sequence_is_not_waited_for() -> None:
    worker = Worker()
    worker.it._delay = known()
    for name in "st":
        worker.open(name)
        worker.ask(name=name)
    worker.it.step()
    for name in "st":
        worker.clock.advance(2e-3)
        worker.ask(name=name, number=2, base=len(PROMPT) + 1)
    worker.it.step()
    worker.ask(name="t", number=3, base=len(PROMPT) + 2)
    assert worker.it.batching_delay() > 0
    worker.it.drop("s")
    assert worker.it.batching_delay() == 0
