"""Streams over a stop or a crash of their coordinator, with a count of each outcome."""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from harness.history import HistoryError, validate
from harness.mid_stream import mid_stream
from harness.reading import Reading
from harness.resumed import history_of
from harness.stacks import RunningStack, together
from harness.waiting import HANG
from paceline.client import Client, GenerationResult

LENGTH = 80
BEGUN = 5
"""Tokens that each stream has before the coordinator is struck."""


@dataclass(frozen=True)
class Asked:
    """A request whose tokens are known from an undisturbed run."""

    prompt: str
    sampling: Mapping[str, Any]
    whole: GenerationResult


SAMPLINGS: Sequence[Mapping[str, Any]] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.95},
    {
        "temperature": 0.8,
        "repetition_penalty": 1.1,
        "frequency_penalty": 0.3,
        "logprobs": 1,
        "min_tokens": 70,
    },
)


def undisturbed(client: Client, count: int, **speculation: Any) -> Sequence[Asked]:
    """So many different requests, of each sampling by turns, and their answers."""
    common = {"max_tokens": LENGTH, "ignore_eos": True}
    requests = [
        (f"import os\n\n\ndef function_{i}(", {**common, **SAMPLINGS[i % 3], "seed": i}) for i in range(count)
    ]
    wholes = together(
        [lambda r=r: client.generate(*r, speculation=speculation, timeout=HANG) for r in requests],  # type: ignore[misc]
        at_once=16,
    )
    return [Asked(*request, whole) for request, whole in zip(requests, wholes, strict=True)]


def restart(stack: RunningStack, number: signal.Signals, asked: Sequence[Asked], late: int) -> Counter[str]:
    """Strike the coordinator while a client with default settings reads all of `asked`.

    `late` of them are asked once more when it has been struck. Counts streams, and those that were `resumed`,
    `lost` (an error, a gap or no end), `doubled` (a token or an end came twice) and `different`.
    """
    with Client(stack.address) as client:

        def begin() -> list[Reading]:
            return [Reading(client, each.prompt, each.sampling) for each in asked]

        # The target stands still meanwhile, so that no stream ends before the coordinator does.
        with mid_stream(stack, begin, BEGUN) as readings:
            struck = stack.stack.kill("coordinator", number)
            begun = [*readings, *(Reading(client, each.prompt, each.sampling) for each in asked[:late])]
            stack.stack.supervisor.wait_until("coordinator", lambda status: status.pid != struck, HANG)
        counts = Counter(streams=len(begun), lost=0, doubled=0, different=0, resumed=0)
        for reading, each in zip(begun, [*asked, *asked[:late]], strict=True):
            counts[outcome(reading, each)] += 1
            counts["resumed"] += reading.num_resumes > 0
        del counts["sound"]
    stack.stack.wait_for_restart("coordinator", after=struck, timeout=HANG)
    return counts


def outcome(reading: Reading, asked: Asked) -> str:
    """`sound`, `lost`, `doubled` or `different`."""
    try:
        result = reading.result()
    except Exception as error:
        print(f"lost: {error!r}")
        return "lost"
    try:
        validate(history_of(reading.chunks), asked.whole.token_ids)
    except HistoryError as error:
        print(f"broken: {error}")
        told = str(error)
        return "doubled" if "again" in told or "twice" in told else "lost" if "gap" in told else "different"
    text = "".join(chunk.text for chunk in reading.chunks)
    if text == result.text and _content(result) == _content(asked.whole):
        return "sound"
    print(f"different: {text!r}, {_content(result)}, not {_content(asked.whole)}")
    return "different"


def _content(result: GenerationResult) -> tuple[Any, ...]:
    """All but what depends on caches and other requests."""
    usage = replace(result.usage, cached_prompt_tokens=0)
    return result.token_ids, result.text, usage, *map(list, result.logprobs or ())
