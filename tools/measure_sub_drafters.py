"""Passes of the draft for a proposal, by kind of text: `python -m tools.measure_sub_drafters [--json]`.

The target writes a text after each prompt, at temperatures 0 and 1. The draft then proposes K tokens, in
coupled mode, after every verdict that this text gives. Passes are counted, so the figures do not depend on
the machine.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draft_worker.drafters.model import ModelDrafter, load
from draft_worker.engine import DraftEngine
from draft_worker.sub_drafters import SUB_DRAFTERS
from paceline.assets import prompts_of_all_kinds
from paceline.core.clock import monotonic
from paceline.core.config import DraftConfig
from paceline.core.messages import DraftProposal, DraftRound, OpenSequence
from paceline.core.types import AcceptanceMode, SamplingParams, SequenceParams
from paceline.decoding.coupled import coupled_choice
from paceline.decoding.noise import CoupledNoise
from paceline.engine.cancel import CancelToken
from paceline.engine.loading.build import Built
from paceline.engine.multi_step import Chain, ChainInput
from paceline.measure.config import MeasureConfig
from paceline.measure.models import SteppedModel
from paceline.measure.models import load as load_target

LONGEST = 2048
SAMPLINGS = {f"T = {t}": SamplingParams(temperature=t, seed=0) for t in (0, 1)}


class CountingDrafter(ModelDrafter):
    """Counts passes and their rows; a chain has a pass of one row for each of its tokens."""

    num_passes = num_rows = 0

    def step(self, *feeds: Any, **how: Any) -> Any:
        """See `Drafter`."""
        self.num_passes += 1
        result = super().step(*feeds, **how)
        self.num_rows += sum(job.rows for job in result.finished)
        return result

    def draw_chains(self, chains: Sequence[ChainInput], cancel: CancelToken | None = None) -> list[Chain]:
        """See `Drafter`."""
        drawn = super().draw_chains(chains, cancel)
        tokens = sum(len(chain.token_ids) for chain in drawn)
        self.num_passes, self.num_rows = self.num_passes + tokens, self.num_rows + tokens
        return drawn


@dataclass(frozen=True)
class Text:
    """A prompt and what the target wrote behind it."""

    params: SequenceParams
    tokens: list[int]

    @classmethod
    def of(cls, target: SteppedModel, prompt: Sequence[int], count: int, sampling: SamplingParams) -> Text:
        """`count` tokens that the target chooses."""
        target.begin()
        tokens = list(prompt)
        for _ in range(count):
            scores = target.score(tokens).logits[None]
            noise = None if sampling.greedy else CoupledNoise(0, len(tokens))
            tokens.append(int(coupled_choice(scores, [noise])))
        return cls(SequenceParams(sampling, AcceptanceMode.COUPLED, len(prompt)), tokens)


def proposals(engine: DraftEngine, of: Text, k: int) -> Iterator[Sequence[int]]:
    """What is proposed in each round, if the verdicts lead to this text."""
    text, prompt_length = of.tokens, of.params.prompt_length
    engine.handle(OpenSequence("s", 1, tuple(text[:prompt_length]), of.params), 0.0)
    known, length, number = prompt_length, prompt_length + 1, 0
    while length < len(text) - k:
        number += 1
        engine.handle(DraftRound("s", 1, number, length, tuple(text[known:length]), k), 0.0)
        events: list[Any] = []
        while not events:
            events += engine.step()
        (event,) = events
        assert isinstance(event, DraftProposal)
        yield event.proposal.token_ids
        known, accepted = length, 0
        while accepted < k and event.proposal.token_ids[accepted] == text[length + accepted]:
            accepted += 1
        length += accepted + 1
    engine.drop("s")


def measured(draft: Built, config: DraftConfig, texts: Sequence[Text], k: int) -> dict[str, float]:
    """Passes and rows for a proposal. The first pass of a text, which reads the prompt, counts too."""
    assert draft.runner is not None
    drafter = CountingDrafter(draft.runner, config, monotonic)
    lengths = {"vocabulary_size": draft.loaded.vocab_size, "max_model_len": draft.max_model_len}
    engine = DraftEngine(drafter, config, **lengths)
    rounds = sum(1 for text in texts for _ in proposals(engine, text, k))
    return {"passes": drafter.num_passes / rounds, "rows": drafter.num_rows / rounds}


def main() -> None:
    """Write a row for each kind of text."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target-model", default="embedded:target")
    parser.add_argument("--draft-model", default="embedded:draft")
    parser.add_argument("-k", type=int, default=8, help="draft tokens of a proposal")
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    target = load_target("target", asked.target_model, MeasureConfig(), LONGEST, monotonic)
    config = DraftConfig(
        model=asked.draft_model,
        threads=1,
        num_blocks=LONGEST // 16,
        block_size=16,
        lookahead_branches=0,
        prefix_cache=False,
        max_batch_tokens=LONGEST,
    )
    draft = load(config)
    tokenizer: Any = target.built.loaded.tokenizer
    texts: dict[str, list[Text]] = defaultdict(list)
    for line in prompts_of_all_kinds().read_text().splitlines():
        entry = json.loads(line)
        prompt = tokenizer(entry["prompt"])["input_ids"]
        for name, sampling in SAMPLINGS.items():
            text = Text.of(target, prompt, asked.max_tokens, sampling)
            texts[f"{entry['kind']}, {name}"].append(text)
    found = {
        kind: {
            name: measured(draft, replace(config, sub_drafter=name), own, asked.k) for name in SUB_DRAFTERS
        }
        for kind, own in texts.items()
    }
    if asked.json:
        json.dump(found, sys.stdout, indent=1)
        return
    print(f"{'passes (rows)':26}" + "".join(f"{name:>18}" for name in SUB_DRAFTERS))
    for kind, row in found.items():
        cells = (f"{figures['passes']:.2f} ({figures['rows']:.1f})" for figures in row.values())
        print(f"{kind:26}" + "".join(f"{cell:>18}" for cell in cells))


if __name__ == "__main__":
    main()
