"""Stop strings and incremental decoding against slow, obvious versions; the ledger against both."""

from __future__ import annotations

import functools

from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from coordinator.sequence.ledger import Ledger
from coordinator.text.detokenizer import StopSearch, StreamDetokenizer
from paceline.core.types import SamplingParams, TokenOrigin
from tests.sim.reference import LetterDetokenizer, earliest_stop, letter

SETTINGS = settings(max_examples=150, deadline=None, derandomize=True, database=None)

letters = st.text("abc", max_size=4)
stops = st.lists(st.text("abc", min_size=1, max_size=4), max_size=3)


@SETTINGS
@given(st.lists(letters, max_size=4), st.lists(letters, max_size=8), stops)
def test_stop_search_equals_a_character_search(
    skipped: list[str], pieces: list[str], given_stops: list[str]
) -> None:
    whole = "".join((*skipped, *pieces))
    search, shown, found = StopSearch(given_stops), "", None
    for i, piece in enumerate((*skipped, *pieces)):
        text, found = search.push(piece) if i >= len(skipped) else (search.skip(piece), None)
        shown += text
        assert whole.startswith(shown)
        if found is not None:
            break
        # Nothing is held back that cannot become a stop string.
        held = whole[len(shown) : len(shown) + len(search._held)]
        assert not held or any(stop.startswith(held) for stop in given_stops)
    want = earliest_stop(whole, given_stops, len("".join(skipped)))
    if want is None:
        assert found is None
        assert shown + search.finish() == whole
    else:
        assert (shown, found) == (whole[: want[0]], want[1])


@functools.cache
def byte_level() -> Tokenizer:
    """A small BPE over bytes, so that tokens end inside characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(["héllo wörld 日本語 hello world 🙂🙂"] * 5, trainer)
    return tokenizer


def streamed(prompt: list[int], generated: list[int]) -> list[str]:
    detokenizer = StreamDetokenizer(byte_level(), prompt)
    return [*(detokenizer.push(token_id) for token_id in generated), detokenizer.finish()]


def continuation(before: str, whole: str) -> str:
    """What `whole` adds to `before`, whose last character may have become another one."""
    while not whole.startswith(before):
        before = before[:-1]
    return whole[len(before) :]


@SETTINGS
@given(st.text("aé日🙂\ufffd ", max_size=8), st.data())
def test_pieces_join_to_the_text_of_all_tokens(text: str, data: st.DataObject) -> None:
    ids = byte_level().encode(text).ids
    cut = data.draw(st.integers(0, len(ids)))
    pieces = streamed(ids[:cut], ids[cut:])
    before, whole = byte_level().decode(ids[:cut]), byte_level().decode(ids)
    assert "".join(pieces) == continuation(before, whole)
    if "\ufffd" not in text:
        assert all("\ufffd" not in piece for piece in pieces)


@SETTINGS
@given(st.lists(st.integers(0, 299), max_size=9), st.lists(st.integers(0, 299), max_size=12))
def test_any_tokens_decode_piecewise(prompt: list[int], generated: list[int]) -> None:
    tokenizer = byte_level()
    prompt, generated = ([i % tokenizer.get_vocab_size() for i in ids] for ids in (prompt, generated))
    before, whole = tokenizer.decode(prompt), tokenizer.decode(prompt + generated)
    assert "".join(streamed(prompt, generated)) == continuation(before, whole)


def test_a_prompts_partial_character_is_not_repeated() -> None:
    ids = byte_level().encode("ab本").ids
    cut = next(n for n in range(len(ids)) if byte_level().decode(ids[:n]).endswith("\ufffd"))
    assert "".join(streamed(ids[:cut], ids[cut:])) == "本"


@SETTINGS
@given(
    st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=8),
    stops,
    st.integers(1, 14),
    st.integers(0, 6),
    st.booleans(),
)
def test_the_ledger_is_independent_of_verdict_cuts(
    verdicts: list[list[int]], given_stops: list[str], max_tokens: int, min_tokens: int, include: bool
) -> None:
    sampling = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=min(min_tokens, max_tokens),
        stop=given_stops,
        stop_token_ids=[4],
        include_stop_str_in_output=include,
    )

    def run(parts: list[list[int]]) -> tuple[list[int], str, object]:
        ledger = Ledger(
            [0], sampling, detokenizer=LetterDetokenizer(), eos_token_ids=frozenset({3}), max_model_len=100
        )
        text, index = "", 0
        for part in parts:
            commit = ledger.commit([(token_id, TokenOrigin.TARGET) for token_id in part])
            assert commit.index == index
            assert list(commit.token_ids) == ledger.token_ids[1 + index :]
            assert commit.finish == ledger.finish
            text += commit.text
            index += len(commit.token_ids)
            if ledger.ended:
                break
        return ledger.token_ids, text, ledger.finish

    whole = [token_id for part in verdicts for token_id in part]
    at_once, one_by_one = run([whole]), run([[token_id] for token_id in whole])
    assert run(verdicts) == at_once == one_by_one
    tokens, text, finish = at_once
    if finish is None:
        everything = "".join(letter(t) for t in tokens[1:])
        assert everything.startswith(text)
