"""The target writes texts; at each position, its distribution is compared with those of the drafters.

Target and drafters take turns of a few steps, on the same tokens, so that a slow phase of the machine affects
all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams
from paceline.decoding import agreement
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.noise import CoupledNoise
from paceline.decoding.rows.row_params import RowParams
from paceline.decoding.sampling import point_mass
from paceline.decoding.transforms import scores_of
from paceline.measure.drafters import MeasuredDrafter
from paceline.measure.models import SteppedModel

TURN = 8
"""Tokens of a turn."""
_WARM_UP = 2 * TURN


@dataclass(frozen=True, slots=True)
class PromptText:
    """A prompt to be continued by the target."""

    kind: str
    prompt: tuple[int, ...]
    max_tokens: int


@dataclass(slots=True)
class Positions:
    """What was measured at the positions of one text, for one drafter. All lists have an entry a position."""

    kind: str
    beta: list[float] = field(default_factory=list)
    coupled: list[float] = field(default_factory=list)
    equal_argmaxes: list[float] = field(default_factory=list)
    rejection_sampling: list[float] = field(default_factory=list)
    naive: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    """Probability that a draft token was accepted by the ratio test, given the text."""
    accepted_coupled: list[float] = field(default_factory=list)
    """The same in coupled mode."""
    guessed: list[float] = field(default_factory=list)
    """1 where the drafter had a guess, else 0."""

    def add(self, p: Tensor, q: Tensor, tokens: Tensor) -> None:
        """Compare distributions, float64 [N, V], at the positions of `tokens`, int64 [N]."""
        terms = agreement.coupled_terms(p, q)
        for values, rows in (
            (self.beta, agreement.acceptance(p, q)),
            (self.coupled, terms.sum(-1)),
            (self.equal_argmaxes, agreement.equal_argmaxes(p, q)),
            (self.rejection_sampling, agreement.rejection_sampling_acceptance(p, q)),
            (self.naive, agreement.naive_acceptance(p, q)),
            (self.accepted, agreement.accepted_given(p, q, tokens)),
            (self.accepted_coupled, agreement.coupled_given(p, terms, tokens)),
            (self.guessed, q.sum(-1) > 0),
        ):
            values.extend(rows.double().tolist())


@dataclass(slots=True)
class StepTimes:
    """Mean seconds of the steps of each turn, of the target and of one drafter."""

    target: list[float] = field(default_factory=list)
    drafter: list[float] = field(default_factory=list)

    def add(self, target: Sequence[float | None], drafter: Sequence[float | None]) -> None:
        """Add one turn; steps that read more than one token have no time."""
        both = [[s for s in steps if s is not None] for steps in (target, drafter)]
        if all(both):
            self.target.append(sum(both[0]) / len(both[0]))
            self.drafter.append(sum(both[1]) / len(both[1]))


@dataclass(slots=True)
class Observations:
    """All measurements of a run, by the drafter's name."""

    positions: dict[tuple[str, float], list[Positions]] = field(default_factory=dict)
    """By drafter and temperature, one entry a text."""
    times: dict[str, StepTimes] = field(default_factory=dict)


def distributions(logits: Tensor, sampling: SamplingParams) -> tuple[Tensor, Tensor]:
    """Scores, float32 [N, V], and the distributions that are sampled from, float64 [N, V].

    A row of logits without a finite value has the distribution 0. At temperature 0, a distribution is a point
    mass on the argmax, the lowest id among equals.
    """
    guessed = (logits > -torch.inf).any(-1)
    filled = torch.where(guessed[:, None], logits, 0.0)
    scores = scores_of(filled, RowParams.build([sampling], [len(logits)], logits.device))
    if sampling.greedy:
        probabilities = point_mass(coupled_choice(scores, [None] * len(scores)), scores.shape[1])
    else:
        probabilities = scores.double().softmax(-1)
    return scores, probabilities * guessed[:, None]


class Measurement:
    """Runs a target and drafters over texts."""

    def __init__(self, target: SteppedModel, drafters: Sequence[MeasuredDrafter]) -> None:
        self._target = target
        self._drafters = drafters
        self._ends = target.built.loaded.eos_token_ids
        self.found = Observations(times={each.name: StepTimes() for each in drafters})

    def warm_up(self, text: PromptText) -> None:
        """Run all models once, unmeasured: some compile their code at the first steps."""
        tokens = (*text.prompt, *[text.prompt[-1]] * _WARM_UP)
        for model in (self._target, *self._drafters):
            model.begin()
            for length in range(len(text.prompt), len(tokens)):
                model.score(tokens[:length])

    def run(
        self,
        texts: Sequence[PromptText],
        samplings: Sequence[SamplingParams],
        progress: Callable[[str], None],
    ) -> None:
        """Measure all texts, each sampled in its own way. `progress` receives a description of each step.

        Raises InvalidArgumentError naming the model or drafter if its logits are not numbers.
        """
        for number, (text, sampling) in enumerate(zip(texts, samplings, strict=True), 1):
            progress(f"temperature {sampling.temperature:g}: text {number} of {len(texts)}")
            self._one(text, sampling)

    def _one(self, text: PromptText, sampling: SamplingParams) -> None:
        tokens = list(text.prompt)
        rows = {each.name: Positions(text.kind) for each in self._drafters}
        for model in (self._target, *self._drafters):
            model.begin()
        end = len(tokens) + text.max_tokens
        while len(tokens) < end and not self._is_over(tokens, text):
            begun = len(tokens)
            p, target_times = self._write(tokens, min(end, begun + TURN), sampling)
            written = torch.tensor(tokens[begun:], device=p.device)
            for drafter in self._drafters:
                scored = [drafter.score(tokens[:i]) for i in range(begun, len(tokens))]
                logits = torch.stack([row.logits for row in scored]).to(p.device)
                field_name = "draft_model" if isinstance(drafter, SteppedModel) else "drafter"
                _check_numbers(field_name, drafter.name, logits)
                rows[drafter.name].add(p, distributions(logits, sampling)[1], written)
                self.found.times[drafter.name].add(target_times, [row.seconds for row in scored])
        for name, positions in rows.items():
            self.found.positions.setdefault((name, sampling.temperature), []).append(positions)

    def _is_over(self, tokens: Sequence[int], text: PromptText) -> bool:
        return len(tokens) > len(text.prompt) and tokens[-1] in self._ends

    def _write(
        self, tokens: list[int], end: int, sampling: SamplingParams
    ) -> tuple[Tensor, list[float | None]]:
        """Append the target's tokens up to length `end`, or an end of the text; returns p and step times."""
        assert sampling.seed is not None
        p, seconds = [], []
        while len(tokens) < end:
            row = self._target.score(tokens)
            _check_numbers("target_model", self._target.name, row.logits)
            scores, probabilities = distributions(row.logits[None], sampling)
            noise = None if sampling.greedy else CoupledNoise(sampling.seed, len(tokens))
            token = int(coupled_choice(scores, [noise]))
            p.append(probabilities)
            seconds.append(row.seconds)
            tokens.append(token)
            if token in self._ends:
                break
        return torch.cat(p), seconds


def _check_numbers(field_name: str, name: str, logits: Tensor) -> None:
    if bool((torch.isnan(logits) | (logits == torch.inf)).any()):
        raise InvalidArgumentError(field_name, f"{name} has logits that are not numbers")
