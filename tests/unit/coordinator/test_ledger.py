"""The end of a sequence: verdicts are clipped there before the commit."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sequence.ledger import Commit, Finish, Ledger
from paceline.core.types import FinishReason, TokenLogprobs, TokenOrigin
from tests.sim.reference import letter
from tests.unit.coordinator.machines import make_ledger

EOS = 25
PROMPT = (3, 4)


class TwoPartDetokenizer:
    """Token 0 is the first half of a character that only another 0 completes."""

    def __init__(self) -> None:
        self.half = False

    def push(self, token_id: int) -> str:
        if token_id == 0:
            self.half = not self.half
            return "" if self.half else "é"
        prefix, self.half = ("\ufffd" if self.half else ""), False
        return prefix + letter(token_id)

    def finish(self) -> str:
        text, self.half = ("\ufffd" if self.half else ""), False
        return text


def ledger(max_model_len: int = 1000, **options: Any) -> Ledger:
    return make_ledger(PROMPT, eos=[EOS], max_model_len=max_model_len, **({"max_tokens": 100} | options))


def commit(to: Ledger, text: str) -> Commit:
    """Letters as one verdict: all accepted but the last."""
    ids = [ord(c) - ord("a") for c in text]
    origins = [TokenOrigin.ACCEPTED] * (len(ids) - 1) + [TokenOrigin.BONUS]
    return to.commit(list(zip(ids, origins, strict=True)))


def committed(of: Ledger) -> str:
    return "".join(letter(t) for t in of.token_ids[len(PROMPT) :])


def test_a_verdict_is_committed_whole() -> None:
    it = ledger()
    first, second = commit(it, "abc"), commit(it, "d")
    assert (first.index, first.text, first.finish) == (0, "abc", None)
    assert first.origins == (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.BONUS)
    assert (second.index, second.token_ids, second.text) == (3, (3,), "d")
    assert it.token_ids == [*PROMPT, 0, 1, 2, 3]
    assert (len(it), it.num_generated, it.remaining, it.ended) == (6, 4, 96, False)


def entry(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -0.5, 1)


@pytest.mark.parametrize(
    ("text", "sampling"),
    [("abcd", {}), ("abzd", {}), ("abcd", {"max_tokens": 2}), ("abcd", {"stop": ["bc"]})],
)
def test_log_probabilities_are_clipped_with_the_tokens(text: str, sampling: dict[str, Any]) -> None:
    tokens = [(ord(c) - ord("a"), TokenOrigin.TARGET) for c in text]
    part = ledger(logprobs=0, **sampling).commit(tokens, [entry(token) for token, _ in tokens])
    assert [told.token_id for told in part.logprobs] == list(part.token_ids)


LONG_PROMPT = (3, 4, 5, 6, 7)


def reporting(**sampling: Any) -> Ledger:
    """A ledger whose prompt's log-probabilities were asked for."""
    return make_ledger(LONG_PROMPT, choice=2, **({"prompt_logprobs": 0} | sampling))


def test_a_prompt_is_reported_once_despite_repeats() -> None:
    it = reporting()
    told: list[int] = []
    for start, end in ((1, 3), (1, 3), (2, 4), (1, 4), (4, 5), (1, 5)):
        assert it.lacks_prompt_logprobs == (len(told) < 4)
        part = it.report_prompt(start, [entry(token) for token in LONG_PROMPT[start:end]])
        assert (part.token_ids, part.text, part.choice) == ((), "", 2)
        told += [each.token_id for each in part.prompt_logprobs]
    assert told == list(LONG_PROMPT[1:])
    assert not it.lacks_prompt_logprobs


@pytest.mark.parametrize(
    ("start", "tokens"),
    [(2, LONG_PROMPT[2:]), (0, LONG_PROMPT), (1, (4, 9)), (1, (*LONG_PROMPT[1:], 8))],
    ids=["a gap", "the first token", "another token", "beyond the prompt"],
)
def test_a_report_unlike_the_prompt_is_refused(start: int, tokens: tuple[int, ...]) -> None:
    it = reporting()
    assert it.report_prompt(start, [entry(token) for token in tokens]) is None
    assert it.lacks_prompt_logprobs


def test_an_unrequested_report_is_refused() -> None:
    it = reporting(prompt_logprobs=None)
    assert not it.lacks_prompt_logprobs
    assert it.report_prompt(1, [entry(4)]) is None


def test_eos_ends_the_sequence_without_text() -> None:
    it = ledger()
    part = commit(it, "abzcd")
    assert part.token_ids == (0, 1, EOS)
    assert part.origins == (TokenOrigin.ACCEPTED,) * 3
    # EOS is the model's own end; `stop_token_id` names what the client asked for.
    assert (part.text, part.finish) == ("ab", Finish(FinishReason.STOP))
    assert committed(it) == "abz"
    with pytest.raises(ValueError, match="has ended"):
        commit(it, "e")


STOP, LENGTH = Finish(FinishReason.STOP), Finish(FinishReason.LENGTH)
AT_Q = Finish(FinishReason.STOP, stop_token_id=16)
SHOWN = {"include_stop_str_in_output": True}
Q = {"stop_token_ids": [16]}


def at(string: str) -> Finish:
    return Finish(FinishReason.STOP, stop_string=string)


@pytest.mark.parametrize(
    ("sampling", "verdict", "text", "kept", "finish"),
    [
        pytest.param({"ignore_eos": True}, "azb", "azb", "azb", None, id="EOS is ignored"),
        pytest.param(
            {"ignore_eos": True, "stop_token_ids": [EOS]},
            "azb",
            "a",
            "az",
            Finish(FinishReason.STOP, stop_token_id=EOS),
            id="EOS as a stop id",
        ),
        pytest.param(SHOWN, "abz", "ab", "abz", STOP, id="EOS is not shown with stop strings"),
        pytest.param(SHOWN | {"skip_special_tokens": False}, "abz", "abz", "abz", STOP, id="EOS is shown"),
        pytest.param(
            {"skip_special_tokens": False}, "abz", "ab", "abz", STOP, id="EOS is shown with both only"
        ),
        pytest.param(Q, "abqd", "ab", "abq", AT_Q, id="a stop id"),
        pytest.param(Q | SHOWN, "abqd", "abq", "abq", AT_Q, id="a shown stop id"),
        pytest.param(
            Q | SHOWN | {"stop": ["bq"]}, "abqd", "abq", "abq", AT_Q, id="a stop id in a stop string"
        ),
        pytest.param({"stop": ["cd"]}, "abcdefg", "ab", "abcd", at("cd"), id="a stop string"),
        pytest.param({"stop": ["cd"]} | SHOWN, "abcdefg", "abcd", "abcd", at("cd"), id="a shown stop string"),
        pytest.param({"stop": ["cde"]}, "abcdz", "abcd", "abcdz", STOP, id="held back before EOS"),
        pytest.param({"stop": ["cde"]} | Q, "abcdq", "abcd", "abcdq", AT_Q, id="held back before a stop id"),
        pytest.param(
            {"stop": ["cde"], "max_tokens": 4}, "abcdx", "abcd", "abcd", LENGTH, id="held back at the end"
        ),
        pytest.param({"max_tokens": 3}, "abcde", "abc", "abc", LENGTH, id="as many as asked for"),
        pytest.param({"max_tokens": 2}, "az", "a", "az", STOP, id="EOS takes precedence over length"),
        pytest.param({"max_tokens": 2, "stop": ["b"]}, "ab", "a", "ab", at("b"), id="so does a stop string"),
        pytest.param(
            {"min_tokens": 3, "max_tokens": 3, "stop": ["c", "bcd"]},
            "abcd",
            "abc",
            "abc",
            LENGTH,
            id="held back within min_tokens",
        ),
    ],
)
def test_a_verdict_is_clipped_at_the_sequences_end(
    sampling: dict[str, Any], verdict: str, text: str, kept: str, finish: Finish | None
) -> None:
    it = ledger(**sampling)
    part = commit(it, verdict)
    assert (part.text, part.finish) == (text, finish)
    assert committed(it) == "".join(map(letter, part.token_ids)) == kept
    assert it.ended is (finish is not None)


def test_a_stop_string_across_verdicts_is_found() -> None:
    it = ledger(stop=["cde"])
    parts = [commit(it, "abc"), commit(it, "d"), commit(it, "ex")]
    assert [p.text for p in parts] == ["ab", "", ""]
    assert parts[-1].finish == Finish(FinishReason.STOP, stop_string="cde")
    assert parts[-1].token_ids == (4,)


def test_held_back_text_is_shown_when_no_stop_string_follows() -> None:
    it = ledger(stop=["cde"])
    assert [commit(it, text).text for text in ("abc", "d", "x")] == ["ab", "", "cdx"]


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_the_models_length_clips_a_verdict(max_tokens: int | None) -> None:
    it = ledger(max_model_len=5, max_tokens=max_tokens)
    assert it.remaining == 3
    part = commit(it, "abcde")
    assert (part.token_ids, part.finish) == ((0, 1, 2), Finish(FinishReason.LENGTH))
    assert len(it) == 5


def test_min_tokens_prevents_early_stop_strings() -> None:
    """As in vLLM: a string that begins early but ends after min_tokens is found."""
    it = ledger(min_tokens=3, stop=["bc", "cd"])
    parts = [commit(it, letter) for letter in "abcd"]
    assert "".join(part.text for part in parts) == "ab"
    assert parts[-1].finish == Finish(FinishReason.STOP, stop_string="cd")
    assert committed(it) == "abcd"


def test_an_early_stop_string_stays_text_within_min_tokens() -> None:
    it = ledger(min_tokens=3, stop=["bc", "abcd"])
    assert [commit(it, letter).text for letter in "abcx"] == ["", "", "", "abcx"]
    assert commit(it, "bc").finish == Finish(FinishReason.STOP, stop_string="bc")


def test_an_incomplete_character_is_held_back() -> None:
    it = ledger(detokenizer=TwoPartDetokenizer())
    assert [commit(it, text).text for text in ("ba", "ab")] == ["b", "éb"]


def test_an_incomplete_last_character_is_a_replacement() -> None:
    part = commit(ledger(detokenizer=TwoPartDetokenizer(), max_tokens=2), "ba")
    assert (part.text, part.finish) == ("b\ufffd", Finish(FinishReason.LENGTH))


def test_an_incomplete_character_before_eos_is_a_replacement() -> None:
    part = commit(ledger(detokenizer=TwoPartDetokenizer(), stop=["bx"]), "baz")
    assert part.text == "b\ufffd"


@pytest.mark.parametrize(("letters", "sampling"), [("ba", {"max_tokens": 2}), ("baz", {})])
@pytest.mark.parametrize(("shown", "text"), [(False, "b"), (True, "b\ufffd")])
def test_a_stop_string_in_held_back_text_ends_the_sequence(
    letters: str, sampling: dict[str, Any], shown: bool, text: str
) -> None:
    """Its finish reason is the stop, and it is shown on request."""
    it = ledger(
        detokenizer=TwoPartDetokenizer(), stop=["\ufffd"], include_stop_str_in_output=shown, **sampling
    )
    part = commit(it, letters)
    assert (part.text, part.finish) == (text, Finish(FinishReason.STOP, stop_string="\ufffd"))
    assert it.finish == part.finish
    replayed = it.fresh(TwoPartDetokenizer())
    replayed.replay(it.token_ids[len(PROMPT) :])
    assert replayed.finish == part.finish, "once: a client that resumed elsewhere was told the other end"


def test_no_incomplete_character_follows_a_stop_string() -> None:
    part = commit(ledger(detokenizer=TwoPartDetokenizer(), stop=["b"]), "cba")
    assert part.text == "c"
