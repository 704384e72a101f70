"""The embedded pair measured by Paceline, and again by transformers and plain sums."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from paceline import assets
from paceline.core.clock import ManualClock
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams
from paceline.loadtest.prompts import PromptLine
from paceline.measure import MeasureConfig, MeasureRecord, run, run_measure
from paceline.measure.drafters import ScoredRow
from paceline.measure.measuring import TURN, Measurement, PromptText, distributions

PROMPTS = (
    PromptLine("import os\n\n\ndef read_lines(path):\n    ", kind="code"),
    PromptLine("In the morning the fog lay over the harbour, and", kind="prose", max_tokens=11),
)
LENGTH = 2 * TURN + 3
CONFIG = MeasureConfig(drafters=("spy",), temperature=(0.0, 0.8), max_tokens=LENGTH, device="cpu")


class Spy:
    """Keeps the texts that it is asked to score."""

    name = "spy"
    operations = weight_bytes = 0.0

    def __init__(self) -> None:
        self.texts: list[list[int]] = []

    def begin(self) -> None:
        self.texts.append([])

    def score(self, text: Sequence[int]) -> ScoredRow:
        self.texts[-1] = list(text)
        return ScoredRow(torch.zeros(2048), 0.0)


class Times:
    """A clock that goes on by another step at every look, and remembers what it said."""

    def __init__(self) -> None:
        self.said: list[float] = [0.0]

    def __call__(self) -> float:
        self.said.append(self.said[-1] + 0.001 * (1 + len(self.said) * 7 % 11))
        return self.said[-1]


@pytest.fixture(scope="module")
def measured() -> tuple[MeasureRecord, Spy, Times]:
    spy, clock = Spy(), Times()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "check_corpus", lambda *_: None)
        patch.setattr(run, "make_drafter", lambda *_: spy)
        record = run_measure(CONFIG, PROMPTS, lambda _: None, clock=clock)
    return record, spy, clock


def of_transformers(role: str, text: Sequence[int]) -> np.ndarray[Any, Any]:
    """Logits of the tokens behind each beginning of the text, float64 [length, vocabulary]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(assets.path(role), dtype=torch.float32).eval()
    with torch.no_grad():
        logits: np.ndarray[Any, Any] = model(torch.tensor([text])).logits[0].double().numpy()
    return logits


def sampled_from(logits: np.ndarray[Any, Any], temperature: float) -> list[float]:
    """The distribution of one row."""
    if temperature == 0:
        best = int(logits.argmax())
        return [float(i == best) for i in range(len(logits))]
    weights = [math.exp((value - logits.max()) / temperature) for value in logits]
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def coupled_by_pairs(p: Sequence[float], q: Sequence[float]) -> float:
    """The definition, over all pairs of tokens."""
    ours, theirs = np.array(p), np.array(q)
    both = [v for v in range(len(p)) if p[v] > 0 and q[v] > 0]
    return math.fsum(1 / np.maximum(ours / p[v], theirs / q[v]).sum() for v in both)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rates_equal_those_of_independent_code(
    measured: tuple[MeasureRecord, Spy, Times], temperature: float, number: int
) -> None:
    record, spy, _ = measured
    text = spy.texts[1 + number + 2 * CONFIG.temperature.index(temperature)]  # after the warm-up
    row = next(
        row
        for row in record.rows
        if (row.kind, row.drafter, row.temperature) == (PROMPTS[number].kind, "embedded:draft", temperature)
    )
    logits = [of_transformers(role, text)[-row.positions :] for role in ("target", "draft")]
    pairs = [tuple(sampled_from(one, temperature) for one in both) for both in zip(*logits, strict=True)]
    assert row.positions == (PROMPTS[number].max_tokens or LENGTH) == len(pairs)
    betas = [math.fsum(map(min, p, q)) for p, q in pairs]
    divergences = [math.fsum(abs(a - (a + b) / 2) for a, b in zip(p, q, strict=True)) for p, q in pairs]
    assert row.alpha == pytest.approx(statistics.fmean(betas), abs=1e-4)
    assert row.d_lk == pytest.approx(statistics.fmean(divergences), abs=1e-4)
    assert row.coupled == pytest.approx(statistics.fmean(coupled_by_pairs(p, q) for p, q in pairs), abs=1e-4)
    equal = [p.argmax() == q.argmax() for p, q in zip(*logits, strict=True)]
    assert row.equal_argmaxes == pytest.approx(statistics.fmean(equal))
    if temperature == 0:  # the text is the target's own
        assert [int(one.argmax()) for one in logits[0]][:-1] == text[-row.positions + 1 :]


@pytest.mark.slow
def test_c_is_the_ratio_of_the_times_that_the_clock_gave(
    measured: tuple[MeasureRecord, Spy, Times],
) -> None:
    """Each step looks at the clock twice, the target's of a turn before the draft's."""
    record, _, clock = measured
    looks = iter(clock.said[1:])
    steps = [end - begun for begun, end in zip(looks, looks, strict=True)]
    steps = steps[2 * 2 * TURN :]  # the warm-up's
    ratios = []
    for _ in CONFIG.temperature:
        for prompt in PROMPTS:
            left, first = prompt.max_tokens or LENGTH, True
            while left:
                turn = min(TURN, left)
                target, draft, steps = steps[:turn], steps[turn : 2 * turn], steps[2 * turn :]
                if first:  # what reads the prompt is no step
                    target, draft, first = target[1:], draft[1:], False
                ratios.append(statistics.fmean(draft) / statistics.fmean(target))
                left -= turn
    assert steps == []
    assert record.costs["embedded:draft"].c.median == pytest.approx(statistics.median(ratios))
    assert record.costs["spy"].c.median == 0


@pytest.mark.slow
def test_costs_in_operations_and_memory_are_ratios_of_weights(
    measured: tuple[MeasureRecord, Spy, Times],
) -> None:
    record, _, _ = measured
    cost = record.costs["embedded:draft"]
    assert cost.c_hat == record.drafts[0].num_parameters / record.target.num_parameters  # tied embeddings
    assert cost.m == record.drafts[0].weight_bytes / record.target.weight_bytes
    assert (record.costs["spy"].c_hat, record.costs["spy"].m) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("prompts", "config", "field", "says"),
    [
        ([PromptLine((1, 5000))], MeasureConfig(device="cpu"), "prompts", "token id 5000 is not below 2048"),
        (PROMPTS, MeasureConfig(device="cpu", max_tokens=3000), "max_tokens", "with the longest prompt"),
        (PROMPTS, MeasureConfig(device="cpu", draft_models=("/none",)), "draft_model", "/none"),
        (PROMPTS, MeasureConfig(device="cpu", drafters=("none",)), "drafter", "must be one of"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    prompts: Sequence[PromptLine], config: MeasureConfig, field: str, says: str
) -> None:
    with pytest.raises(InvalidArgumentError, match=says) as refused:
        run_measure(config, prompts, lambda _: None, clock=ManualClock())
    assert refused.value.field == field


def test_distributions_are_standardised() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0], [-math.inf] * 3, [1.0, 1.0, 0.0]])
    _, greedy = distributions(logits, SamplingParams(temperature=0.0))
    assert greedy.tolist() == [[0, 1, 0], [0, 0, 0], [1, 0, 0]]
    _, warm = distributions(logits, SamplingParams(temperature=0.5, top_k=2))
    share = 1 / (1 + math.exp(-2))
    assert warm[0].tolist() == pytest.approx([0, share, 1 - share])
    assert warm[1].tolist() == [0, 0, 0]
    assert warm[2].tolist() == pytest.approx([0.5, 0.5, 0])


class Broken:
    """A target or drafter whose third row has a value that is no number."""

    operations = weight_bytes = 0.0
    built = SimpleNamespace(loaded=SimpleNamespace(eos_token_ids=frozenset()))

    def __init__(self, name: str, value: float) -> None:
        self.name = name
        self._value = value

    def begin(self) -> None: ...

    def score(self, text: Sequence[int]) -> ScoredRow:
        logits = torch.arange(5.0)
        logits[1] = self._value if len(text) == 3 else 0.0
        return ScoredRow(logits, 0.001)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize(("broken", "field"), [("target", "target_model"), ("table", "drafter")])
def test_logits_that_are_not_numbers_are_refused(broken: str, field: str, value: float) -> None:
    target, table = (Broken(name, value if name == broken else 0.0) for name in ("target", "table"))
    measurement = Measurement(target, [table])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"{broken} has logits") as refused:
        measurement.run([PromptText("", (1,), 8)], [SamplingParams(temperature=0.0, seed=0)], lambda _: None)
    assert refused.value.field == field
