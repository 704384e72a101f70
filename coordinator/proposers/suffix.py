"""Draft tokens by the likeliest continuation of earlier occurrences of the text's end. Pure.

After Oliaro et al. 2025, "SuffixDecoding": the text's end is looked up in the request's own text and in
finished answers of the same tenant. The tokens that followed there are counted, and the likeliest one is
taken as long as the product of their shares stays above a threshold. A path is therefore short where earlier
texts differ and long where they agree.

A suffix tree would count all occurrences. Here the newest ones are counted, from an index of token pairs: the
same choice where they agree, a fraction of the memory, and each token is taken in by one dictionary entry.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from coordinator.proposers.finished_texts import FinishedTexts
from coordinator.proposers.interface import ContextSource, Guess
from paceline.predictors.occurrences import Occurrences, agreement

NAME: Final = "suffix"

CANDIDATES = 8
"""Number of occurrences to count in each text, newest first."""
ENOUGH = 4
"""Number of matches of the full depth after which no more occurrences are looked for."""
SCORED = 8
"""Number of tokens by which paths are compared."""
LENGTH_GRADES = (4, 12)
"""Match lengths at which a new grade begins."""
RATE_GRADES = (0.5, 0.8)
"""Mean shares along a path at which a new grade begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SuffixSettings:
    """Names and defaults are those of vLLM's `suffix_decoding_` settings."""

    max_tree_depth: int = 24
    """Longest match in tokens that is compared."""
    max_spec_factor: float = 1.0
    """A guess has at most this many tokens for each token of its match."""
    min_token_prob: float = 0.1
    """A path ends where the product of its shares falls below this."""


@dataclass(frozen=True, slots=True)
class Place:
    """An earlier occurrence of the text's end."""

    text: Sequence[int]
    following: int
    """Index of the token that followed it."""
    length: int
    """Number of matching tokens."""


@dataclass(frozen=True, slots=True)
class Path:
    """Likeliest continuations of some places."""

    token_ids: tuple[int, ...]
    match_length: int
    """Shortest match of the places."""
    score: float
    """Expected accepted tokens among the first `SCORED`: the sum of the products of shares."""


@dataclass(slots=True)
class SuffixSource(ContextSource):
    """A context source of counted continuations, in the own text and in finished answers."""

    settings: SuffixSettings = field(default_factory=SuffixSettings)
    finished: FinishedTexts = field(default_factory=lambda: FinishedTexts(0))
    """Answers of earlier requests."""
    salt: str = ""
    """Only requests with the same salt share answers."""
    prompt_length: int = 0
    """Tokens at the beginning of the text that are not shared."""
    name: str = NAME
    _own: Occurrences = field(default_factory=Occurrences)

    def guess(self, tokens: Sequence[int], most: int, after: Sequence[int] = ()) -> Guess | None:
        """The best path; None if the last two tokens did not occur together before."""
        if len(tokens) < 2:
            return None
        places = sorted(self._places(tokens), key=lambda place: -place.length)
        if not places:
            return None
        best = self._best_path(places)
        if len(after) + most > SCORED:
            same = [place for place in places if place.length >= best.match_length]
            best = self._path(same, len(after) + most)
        token_ids = best.token_ids[len(after) : len(after) + most]
        if not token_ids or best.token_ids[: len(after)] != tuple(after):
            return None
        rate = best.score / min(len(best.token_ids), SCORED)
        grade = 3 * sum(rate >= least for least in RATE_GRADES)
        grade += sum(best.match_length >= least for least in LENGTH_GRADES)
        return Guess(self.name, token_ids, best.match_length + len(after), grade, min(rate, 0.9))

    def close(self, tokens: Sequence[int]) -> None:
        """Share the answer with later requests of the tenant."""
        self.finished.add(self.salt, tokens[self.prompt_length :])

    def _places(self, tokens: Sequence[int]) -> Iterator[Place]:
        last, most = len(tokens) - 1, self.settings.max_tree_depth
        self._own.take_in(tokens, last)
        found = 0
        for text, occurrences in [(tokens, self._own), *self.finished.texts(self.salt)]:
            for end in islice(occurrences.ends(tokens, last), CANDIDATES):
                length = agreement(text, end, tokens, last, most)
                yield Place(text, end + 1, length)
                found += length == most
                if found == ENOUGH:
                    return

    def _best_path(self, places: Sequence[Place]) -> Path:
        best = Path((), 0, -1.0)
        for group in groups(places):
            path = self._path(group, SCORED)
            best = path if path.score > best.score else best
            if best.score == SCORED:
                break  # all of the longest matches agree
        return best

    def _path(self, places: Sequence[Place], most: int) -> Path:
        """The likeliest continuation of each position, the newest among equals."""
        length = min(place.length for place in places)
        most = min(most, max(1, int(length * self.settings.max_spec_factor)))
        token_ids: list[int] = []
        share, score = 1.0, 0.0
        while len(token_ids) < most:
            following: dict[int, list[Place]] = {}
            for place in places:
                index = place.following + len(token_ids)
                if index < len(place.text) and (token := place.text[index]) >= 0:
                    following.setdefault(token, []).append(place)
            if not following:
                break
            token, chosen = max(following.items(), key=lambda item: len(item[1]))
            share *= len(chosen) / len(places)
            if share < self.settings.min_token_prob:
                break
            token_ids.append(token)
            if len(token_ids) <= SCORED:
                score += share
            places = chosen
        return Path(tuple(token_ids), length, score)


def groups(places: Sequence[Place]) -> Iterator[Sequence[Place]]:
    """The places with the longest match, those with at least half of it, and all; without repetitions.

    A long match is specific, and a short one has more occurrences to count. `places` are sorted by length,
    the longest first.
    """
    longest = places[0].length
    size = 0
    for least in (longest, (longest + 1) // 2, 0):
        group = [place for place in places if place.length >= least]
        if len(group) > size:
            size = len(group)
            yield group
