"""The contract of context sources; every registered one is tested."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.proposers.interface import ContextSource
from coordinator.proposers.registry import CONTEXT_SOURCES, SourceSetting

TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=40)
SETTING = SourceSetting()
NAMES = st.sampled_from(sorted(CONTEXT_SOURCES))


def made(name: str, tokens: list[int]) -> ContextSource:
    """A source that has seen the text grow token by token."""
    source = CONTEXT_SOURCES[name](SETTING)
    for length in range(1, len(tokens)):
        source.guess(tokens[:length], 4)
    return source


@settings(deadline=None)
@given(NAMES, TEXTS, st.integers(1, 8))
def test_a_guess_names_its_source_and_is_short_enough(name: str, tokens: list[int], most: int) -> None:
    guess = made(name, tokens).guess(tokens, most)
    if guess is not None:
        assert guess.source == name
        assert 1 <= len(guess.token_ids) <= most
        assert guess.context_length >= 0
        assert 0 < guess.prior_rate < 1
        assert guess.proposal.token_ids == guess.token_ids
        assert guess.cut(1).token_ids == guess.token_ids[:1]


@settings(deadline=None)
@given(NAMES, TEXTS, st.integers(1, 8))
def test_a_guess_depends_on_the_text_alone(name: str, tokens: list[int], most: int) -> None:
    """However the text grew, and however often the source was asked."""
    source = made(name, tokens)
    first = source.guess(tokens, most)
    assert source.guess(tokens, most) == first
    assert CONTEXT_SOURCES[name](SETTING).guess(tokens, most) == first


@settings(deadline=None)
@given(NAMES, TEXTS, st.integers(1, 6), st.integers(1, 6))
def test_a_guess_continues_from_itself(name: str, tokens: list[int], ahead: int, most: int) -> None:
    source = made(name, tokens)
    whole = source.guess(tokens, ahead + most)
    if whole is None or len(whole.token_ids) <= ahead:
        return
    behind = source.guess(tokens, most, whole.token_ids[:ahead])
    assert behind.token_ids == whole.token_ids[ahead:]
