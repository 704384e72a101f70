"""Plain decoding, written as slowly and obviously as possible: what every faulty run must equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from paceline.core.types import FinishReason, SamplingParams
from tests.sim.toys import ToyModel, own_choice


@dataclass(frozen=True)
class Expected:
    """What the client must have received when its request finished."""

    token_ids: tuple[int, ...]
    text: str
    reason: FinishReason


def letter(token_id: int) -> str:
    """The text of a toy token."""
    return chr(ord("a") + token_id)


class LetterDetokenizer:
    """One letter a token."""

    def push(self, token_id: int) -> str:
        return letter(token_id)

    def finish(self) -> str:
        return ""


def earliest_stop(text: str, stops: Sequence[str], start: int) -> tuple[int, str] | None:
    """(where it begins, the stop string) that is complete first when reading character by character."""
    for end in range(start + 1, len(text) + 1):
        for begin in range(start, end):
            if text[begin:end] in stops:
                return begin, text[begin:end]
    return None


def plain_decoding(
    model: ToyModel,
    prompt: Sequence[int],
    sampling: SamplingParams,
    *,
    eos: Sequence[int] = (),
    max_model_len: int = 10**6,
) -> Expected:
    """Token by token, without draft, cache, rounds or processes. Greedy and coupled modes."""
    tokens = list(prompt)
    text = ""
    free_of_stops = 0
    limit = max_model_len - len(prompt)
    if sampling.max_tokens is not None:
        limit = min(limit, sampling.max_tokens)
    while True:
        token = own_choice(model, tokens, sampling, len(prompt), eos)
        tokens.append(token)
        generated = tuple(tokens[len(prompt) :])
        if token in sampling.stop_token_ids or (token in eos and not sampling.ignore_eos):
            if sampling.include_stop_str_in_output and token in sampling.stop_token_ids:
                text += letter(token)
            return Expected(generated, text, FinishReason.STOP)
        text += letter(token)
        if len(generated) <= sampling.min_tokens:
            free_of_stops = len(text)
        elif (found := earliest_stop(text, sampling.stop, free_of_stops)) is not None:
            begin, stop = found
            shown = begin + len(stop) if sampling.include_stop_str_in_output else begin
            return Expected(generated, text[:shown], FinishReason.STOP)
        if len(generated) >= limit:
            return Expected(generated, text, FinishReason.LENGTH)
