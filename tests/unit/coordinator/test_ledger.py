"""The end of a sequence: verdicts are clipped there before the commit."""

from __future__ import annotations

from typing import Any

import pytest

from coordinator.sequence.ledger import Commit, Finish, Ledger
from paceline.core.types import FinishReason, SamplingParams, TokenLogprobs, TokenOrigin
from tests.sim.reference import LetterDetokenizer, letter

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


def ledger(max_model_len: int = 1000, detokenizer: object = None, **sampling: object) -> Ledger:
    values = {"max_tokens": 100, **sampling}
    return Ledger(
        PROMPT,
        SamplingParams(**values),  # type: ignore[arg-type]
        detokenizer=detokenizer or LetterDetokenizer(),  # type: ignore[arg-type]
        eos_token_ids=frozenset({EOS}),
        max_model_len=max_model_len,
    )


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
    return Ledger(
        LONG_PROMPT,
        SamplingParams(**{"prompt_logprobs": 0, **sampling}),
        detokenizer=LetterDetokenizer(),
        eos_token_ids=frozenset(),
        max_model_len=100,
        choice=2,
    )


def test_a_prompt_is_reported_once_despite_repeats() -> None:
    it = reporting()
    told: list[int] = []
    for start, end in ((1, 3), (1, 3), (2, 4), (1, 4), (4, 5), (1, 5)):
        assert it.lacks_prompt_logprobs == (len(told) < 4)
        part = it.report_prompt(start, [entry(token) for token in LONG_PROMPT[start:end]])
        assert part is not None
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


def test_ignore_eos_continues_past_eos() -> None:
    assert commit(ledger(ignore_eos=True), "azb").text == "azb"


def test_an_eos_stop_id_ends_despite_ignore_eos() -> None:
    part = commit(ledger(ignore_eos=True, stop_token_ids=[EOS]), "azb")
    assert part.finish == Finish(FinishReason.STOP, stop_token_id=EOS)


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abq")])
def test_a_stop_id_is_shown_only_on_request(include: bool, text: str) -> None:
    part = commit(ledger(stop_token_ids=[16], include_stop_str_in_output=include), "abqd")
    assert (part.text, part.token_ids) == (text, (0, 1, 16))
    assert part.finish == Finish(FinishReason.STOP, stop_token_id=16)


def test_include_stop_str_in_output_does_not_show_eos() -> None:
    assert commit(ledger(include_stop_str_in_output=True), "abz").text == "ab"


def test_a_shown_stop_token_that_is_a_stop_string_keeps_text() -> None:
    part = commit(ledger(stop_token_ids=[16], stop=["bq"], include_stop_str_in_output=True), "abqd")
    assert (part.text, part.finish) == ("abq", Finish(FinishReason.STOP, stop_token_id=16))


@pytest.mark.parametrize(("include", "text"), [(False, "ab"), (True, "abcd")])
def test_a_stop_string_across_tokens_clips_text_and_tokens(include: bool, text: str) -> None:
    it = ledger(stop=["cd"], include_stop_str_in_output=include)
    part = commit(it, "abcdefg")
    assert (part.text, part.finish) == (text, Finish(FinishReason.STOP, stop_string="cd"))
    assert part.token_ids == (0, 1, 2, 3)
    assert committed(it) == "abcd"


def test_a_stop_string_across_verdicts_is_found() -> None:
    it = ledger(stop=["cde"])
    parts = [commit(it, "abc"), commit(it, "d"), commit(it, "ex")]
    assert [p.text for p in parts] == ["ab", "", ""]
    assert parts[-1].finish == Finish(FinishReason.STOP, stop_string="cde")
    assert parts[-1].token_ids == (4,)


def test_held_back_text_is_shown_when_no_stop_string_follows() -> None:
    it = ledger(stop=["cde"])
    assert [commit(it, text).text for text in ("abc", "d", "x")] == ["ab", "", "cdx"]


@pytest.mark.parametrize("end", ["z", "q"])
def test_held_back_text_is_shown_at_the_end(end: str) -> None:
    it = ledger(stop=["cde"], stop_token_ids=[16])
    assert commit(it, "abcd" + end).text == "abcd"


def test_held_back_text_is_shown_with_the_last_token() -> None:
    part = commit(ledger(stop=["cde"], max_tokens=4), "abcdx")
    assert (part.text, part.token_ids, part.finish) == ("abcd", (0, 1, 2, 3), Finish(FinishReason.LENGTH))


def test_max_tokens_clips_a_verdict_before_the_commit() -> None:
    it = ledger(max_tokens=3)
    part = commit(it, "abcde")
    assert (part.token_ids, part.finish) == ((0, 1, 2), Finish(FinishReason.LENGTH))
    assert (committed(it), it.remaining) == ("abc", 0)


@pytest.mark.parametrize("max_tokens", [None, 50])
def test_the_models_length_clips_a_verdict(max_tokens: int | None) -> None:
    it = ledger(max_model_len=5, max_tokens=max_tokens)
    assert it.remaining == 3
    part = commit(it, "abcde")
    assert (part.token_ids, part.finish) == ((0, 1, 2), Finish(FinishReason.LENGTH))
    assert len(it) == 5


def test_a_stop_takes_precedence_over_length() -> None:
    assert commit(ledger(max_tokens=2), "az").finish == Finish(FinishReason.STOP)
    assert commit(ledger(max_tokens=2, stop=["b"]), "ab").finish == Finish(FinishReason.STOP, stop_string="b")


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


def test_an_end_within_min_tokens_shows_held_back_text() -> None:
    part = commit(ledger(min_tokens=3, max_tokens=3, stop=["c", "bcd"]), "abcd")
    assert (part.text, part.finish) == ("abc", Finish(FinishReason.LENGTH))


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


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_the_end_token_is_shown_with_special_tokens(skips: bool, include: bool) -> None:
    part = commit(ledger(skip_special_tokens=skips, include_stop_str_in_output=include), "abz")
    assert part.text == ("abz" if include and not skips else "ab")
    assert part.finish == Finish(FinishReason.STOP)
