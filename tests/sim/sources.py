"""What context sources cost the event loop, and what they guess: `python -m tests.sim.sources [--json]`.

Sequences repeat files of this repository, which stand for answers. In each round every source is asked for up
to 8 tokens, as the planner asks; the longest correct guess is committed with the token after it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from coordinator.proposers.finished_texts import FinishedTexts
from coordinator.proposers.registry import CONTEXT_SOURCES, SourceSetting
from paceline.assets.tokenizer import load_tokenizer

ROOT = Path(__file__).parents[2]
TEXTS = {
    "prose": ("docs/architecture.md", "docs/decoding.md"),
    "code": ("coordinator/round/steps.py", "coordinator/round/machine.py"),
    "JSON": ("deploy/grafana/paceline.json",),
}
SEQUENCES, PROMPT, ANSWER, MOST = 64, 400, 200, 8


def texts_of(files: Sequence[str]) -> list[list[int]]:
    """A text for each sequence: prompt and answer, from different places of the files."""
    tokenizer = load_tokenizer("embedded:target", "tokenizer")
    tokens = [token for file in files for token in tokenizer.encode((ROOT / file).read_text()).ids]
    length = PROMPT + ANSWER
    step = max(1, (len(tokens) - length) // SEQUENCES)
    return [tokens[start : start + length] for start in range(0, step * SEQUENCES, step)]


def measured(texts: Sequence[Sequence[int]]) -> dict[str, dict[str, float]]:
    """By source: microseconds for each committed token, and correct tokens of a guess."""
    finished = FinishedTexts(10_000)
    seconds = dict.fromkeys(CONTEXT_SOURCES, 0.0)
    correct = dict.fromkeys(CONTEXT_SOURCES, 0)
    rounds = committed = 0
    for text in texts:
        setting = SourceSetting(finished=finished, prompt_length=PROMPT)
        sources = {name: make(setting) for name, make in CONTEXT_SOURCES.items()}
        length = PROMPT
        while length < len(text):
            tokens, best = list(text[:length]), 0
            for name, source in sources.items():
                begun = time.perf_counter()
                guess = source.guess(tokens, MOST)
                seconds[name] += time.perf_counter() - begun
                right = 0 if guess is None else agreed(guess.token_ids, text[length:])
                correct[name] += right
                best = max(best, right)
            rounds += 1
            committed += min(best + 1, len(text) - length)
            length += best + 1
        for source in sources.values():
            source.close(text)
    return {
        name: {"us_per_token": 1e6 * seconds[name] / committed, "correct_per_guess": correct[name] / rounds}
        for name in CONTEXT_SOURCES
    }


def agreed(guess: Sequence[int], text: Sequence[int]) -> int:
    """Number of leading tokens of a guess that are those of the text."""
    length = 0
    while length < min(len(guess), len(text)) and guess[length] == text[length]:
        length += 1
    return length


def main() -> None:
    """Write a row for each text and source."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    asked = parser.parse_args()
    found = {kind: measured(texts_of(files)) for kind, files in TEXTS.items()}
    if asked.json:
        json.dump(found, sys.stdout, indent=1)
        return
    for kind, by_source in found.items():
        total = sum(row["us_per_token"] for row in by_source.values())
        print(f"{kind}: {total:.1f} us a committed token for all sources")
        for name, row in by_source.items():
            print(
                f"  {name:14} {row['us_per_token']:6.1f} us   {row['correct_per_guess']:.2f} correct a guess"
            )


if __name__ == "__main__":
    main()
