"""Value types of a request and of one round.

All types are frozen. The request types validate on construction and raise `InvalidArgumentError` with the
field's name.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple, Self

from paceline.core import limits
from paceline.core.acceptance import GREEDY_MODE, AcceptanceMode
from paceline.core.errors import InvalidArgumentError
from paceline.core.sampling import SamplingParams
from paceline.core.structured import StructuredOutputs
from paceline.core.validation import (
    DraftTokens,
    TreeWidth,
    check_draw,
    draft_tokens,
    from_mapping,
    number_of_drafts,
    prompt_lookup_range,
    require,
    tree_nodes,
    tree_width,
)

__all__ = [
    "CHAIN",
    "AcceptanceMode",
    "FinishReason",
    "Outcome",
    "Proposal",
    "SamplingParams",
    "SequenceParams",
    "SparseDistribution",
    "SpeculationParams",
    "StructuredOutputs",
    "Timings",
    "TokenLogprobs",
    "TokenOrigin",
    "TreeShape",
    "Verdict",
    "depths_of",
]


class FinishReason(enum.Enum):
    """Why a sequence ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenOrigin(enum.Enum):
    """How a committed token was produced."""

    ACCEPTED = "accepted"
    """Drafted, and accepted by the target."""
    CORRECTION = "correction"
    """The target's token at the first rejected position."""
    BONUS = "bonus"
    """The target's token after a fully accepted proposal."""
    TARGET = "target"
    """Plain decoding: the round had no proposal."""


_CHECKS: Final[Mapping[str, Callable[[str, Any], object]]] = {
    "num_speculative_tokens": draft_tokens,
    "tree_width": tree_width,
    "max_tree_nodes": tree_nodes,
    "drafts_per_sequence": number_of_drafts,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationParams:
    """How to speculate for one request.

    `num_speculative_tokens` is K; `auto` lets the server choose it for every round, up to the server's bound,
    and 0 switches drafting off. None takes the server's setting. `acceptance` None takes the server's default
    mode.

    `drafter` names the only source of draft tokens: `draft` for the draft worker, or a context source of the
    server, which guesses from texts (`prompt-lookup`, `ngram`, `suffix`, `grammar`). None leaves the choice
    among all its sources to the server, for each round by expected tokens per second. In rejection or block
    mode above temperature 0 with a fixed K, None means the draft worker alone: the choice depends on measured
    times, so a seed would not reproduce its tokens. `prompt_lookup` True adds prompt lookup to the server's
    sources, and False forbids all context sources; it excludes `drafter`. `prompt_lookup_min` and
    `prompt_lookup_max` are the shortest match after which prompt lookup copies, and the longest that it
    compares.

    `draft_temperature`, `draft_top_k` and `draft_top_p` replace the request's own values where the draft
    draws. The output stays that of the target: q is what was drawn from. They are refused at temperature 0.

    With `tree_width` above 1 the draft proposes a tree: up to so many children after each node, K deep.
    `auto` lets the server choose between chain and tree for every round. Up to `drafts_per_sequence` draft
    workers propose for one round, and their proposals are merged into one tree. `max_tree_nodes` bounds the
    draft tokens of such a round. In block mode above temperature 0 there are only chains of one draft.
    """

    num_speculative_tokens: DraftTokens | None = None
    acceptance: AcceptanceMode | str | None = None
    drafter: str | None = None
    prompt_lookup: bool | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None
    draft_temperature: float | None = None
    draft_top_k: int | None = None
    draft_top_p: float | None = None
    tree_width: TreeWidth | None = None
    max_tree_nodes: int | None = None
    drafts_per_sequence: int | None = None
    """Most draft workers that propose for one round."""

    def __post_init__(self) -> None:
        """Convert a mode given by name. Raises InvalidArgumentError naming the field."""
        for name, check in _CHECKS.items():
            if (value := getattr(self, name)) is not None:
                check(name, value)
        if isinstance(self.acceptance, str):
            names = [mode.value for mode in AcceptanceMode]
            require(self.acceptance in names, "acceptance", f"must be one of {', '.join(names)}")
            object.__setattr__(self, "acceptance", AcceptanceMode(self.acceptance))
        known = self.acceptance is None or isinstance(self.acceptance, AcceptanceMode)
        require(known, "acceptance", "must be an acceptance mode or its name")
        truth = self.prompt_lookup is None or isinstance(self.prompt_lookup, bool)
        require(truth, "prompt_lookup", "must be true or false")
        self._check_sources()
        if self.draft_top_k == -1:
            object.__setattr__(self, "draft_top_k", 0)
        given = self.draft_temperature, self.draft_top_k, self.draft_top_p
        temperature, top_k, top_p = (
            default if value is None else value for value, default in zip(given, (1.0, 0, 1.0), strict=True)
        )
        check_draw("draft_", temperature, top_k, top_p)  # type: ignore[arg-type]

    def _check_sources(self) -> None:
        if self.drafter is not None:
            named = isinstance(self.drafter, str) and 0 < len(self.drafter) <= limits.MAX_NAME_CHARACTERS
            require(named, "drafter", "must be the name of a source of draft tokens")
            why = "cannot be given with prompt_lookup: either names the sources"
            require(self.prompt_lookup is None, "drafter", why)
        prompt_lookup_range(self.prompt_lookup_min, self.prompt_lookup_max)

    @property
    def mode(self) -> AcceptanceMode | None:
        """The acceptance mode, or None for the server's default."""
        assert not isinstance(self.acceptance, str)
        return self.acceptance

    def draft_sampling(self, sampling: SamplingParams) -> SamplingParams:
        """How the draft draws for a request with this sampling.

        Raises InvalidArgumentError naming a setting of the draft that has no meaning at temperature 0.
        """
        changes: dict[str, Any] = {
            name: value
            for name in ("temperature", "top_k", "top_p")
            if (value := getattr(self, f"draft_{name}")) is not None
        }
        for name in changes if sampling.greedy else ():
            raise InvalidArgumentError(
                f"draft_{name}", "cannot be given at temperature 0, where nothing is drawn"
            )
        return replace(sampling, **changes) if changes else sampling

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Self:
        """Build from a dictionary. Raises InvalidArgumentError for an unknown name."""
        result: Self = from_mapping(cls, values)
        return result


@dataclass(frozen=True, slots=True)
class SequenceParams:
    """The part of a request that a worker keeps: how to sample, how to accept, where the prompt ends."""

    sampling: SamplingParams
    mode: AcceptanceMode
    prompt_length: int
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    """`sampling.bad_words` tokenised by the target's tokenizer; none of these may be completed."""
    cache_salt: str = ""
    """Only sequences with the same salt share cached prefixes."""
    traceparent: str = ""
    """W3C trace context of the request's span; empty if the request is not traced."""
    draft_index: int = 0
    """Which of the sequence's drafts a worker is. Draws of different ones are independent."""

    @property
    def judged_as(self) -> AcceptanceMode:
        """The mode whose acceptance rule applies to this request."""
        return GREEDY_MODE if self.sampling.greedy else self.mode

    @property
    def target_decides(self) -> bool:
        """True if every token is the target's own choice: with shared noise, or at temperature 0."""
        return self.judged_as.facts.shares_noise


_ONE: Final = struct.pack("<f", 1.0)


@dataclass(frozen=True, slots=True)
class SparseDistribution:
    """The distribution q that one draft token was drawn from, restricted to its support.

    `token_ids` are little-endian uint32 and `probabilities` little-endian float32, as on the wire, so
    forwarding copies nothing. Draft and target normalise the same float32 values in float64.
    """

    token_ids: bytes = b""
    probabilities: bytes = b""
    uniform_over: int = 0
    """If not 0, all ids below it are equally likely and there are no others; both lists are then empty."""

    @classmethod
    def point(cls, token_id: int) -> Self:
        """All probability on one token, as of one that was not drawn."""
        return cls(struct.pack("<I", token_id), _ONE)

    def __len__(self) -> int:
        return self.uniform_over or len(self.token_ids) // 4


def depths_of(parents: Sequence[int]) -> list[int]:
    """Each node's depth in a tree of these parents, in topological order; children of the root have 1."""
    depths: list[int] = []
    for parent in parents:
        depths.append(depths[parent] + 1 if parent >= 0 else 1)
    return depths


class TreeShape(NamedTuple):
    """Bounds of a draft tree, besides its depth."""

    width: int = 1
    """Most children of a node; 1 is a chain."""
    nodes: int = 0
    """Most tries, before those that drew the same token after the same node are merged. Ignored for a
    chain."""

    @property
    def is_chain(self) -> bool:
        """True if it bounds nothing but the depth."""
        return self.width == 1


CHAIN: Final = TreeShape()


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens as a tree in topological order.

    `parents` is empty for a chain; else it has one entry per node: the parent's index, or -1 for the root.
    No two children of a node have the same token. Where draft and target share the noise, nodes are in the
    order of their value: the first n of them are the best tree of n nodes.

    A try is a token that a drafter drew after a node. Tries of one token after one node share that node.
    `tries` has the node of each, in the order in which tries after one node are judged; empty means one for
    each node, in order. `distributions` is empty in coupled mode or for a deterministic drafter; else it has
    one entry per try.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    distributions: tuple[SparseDistribution, ...] = ()
    tries: tuple[int, ...] = ()

    @property
    def num_draft_tokens(self) -> int:
        """K of a chain, number of nodes of a tree."""
        return len(self.token_ids)

    @property
    def is_tree(self) -> bool:
        """True if the nodes have parents of their own; a chain may be written as a tree."""
        return bool(self.parents)

    @property
    def depth(self) -> int:
        """Number of nodes on the longest path."""
        return max(depths_of(self.parents)) if self.parents else len(self.token_ids)

    def path_to(self, node: int | None) -> tuple[int, ...]:
        """The nodes of a tree from a child of the root to `node`; none for None."""
        path: list[int] = []
        while node is not None and node >= 0:
            path.append(node)
            node = self.parents[node]
        return tuple(reversed(path))

    def children_of(self, node: int | None) -> tuple[int, ...]:
        """The children of a node of a tree in order; those of the root for None."""
        wanted = -1 if node is None else node
        return tuple(child for child, parent in enumerate(self.parents) if parent == wanted)

    def accepted(self, outcome: Outcome) -> tuple[int, ...]:
        """The draft tokens that an outcome accepts."""
        if not self.parents:
            return self.token_ids[: outcome.num_accepted]
        return tuple(self.token_ids[node] for node in self.path_to(outcome.last_node))

    def first(self, count: int) -> Proposal:
        """Its first `count` nodes. Only for a proposal without distributions: dropping tries is biased."""
        return Proposal(self.token_ids[:count], self.parents[:count])


@dataclass(frozen=True, slots=True)
class Timings:
    """Time spent on one answer, in seconds, measured by the answering worker."""

    queue: float = 0.0
    """From the command's arrival to its first pass."""
    compute: float = 0.0
    """Passes of the command, sampling and acceptance included."""
    rows: int = 0
    """Rows of all sequences in the command's last pass."""
    sequences: int = 0
    """Sequences in the command's last pass; 1, with no rows, if no pass was needed."""
    prefill: float = 0.0
    """Time of this sequence's prefill rows (prompt, or tokens that the worker had missed). Each pass is
    divided by rows. Part of `compute`, except for tokens that a draft read before it was asked."""
    prefill_rows: int = 0
    """Prefill rows of all sequences in the command's last pass."""
    prefill_rows_before: int = 0
    """Prefill rows of the pass that was running on arrival, weighted by its remaining share. Reported by
    targets only."""
    cached_tokens: int = 0
    """Entries of this sequence found in the prefix cache."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position under the target's distribution, before any transform.

    `top_token_ids` are the most likely tokens, best first, as many as requested. They need not include the
    token itself.
    """

    token_id: int
    logprob: float
    rank: int
    """1 + the number of more likely tokens."""
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Outcome(NamedTuple):
    """The result of a round that the next round depends on."""

    num_accepted: int
    next_token: int
    last_node: int | None = None
    """The last accepted node of a tree; None for a chain, or if no token is accepted."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The target's answer to one round: the accepted draft tokens and the next token."""

    num_accepted: int
    token_ids: tuple[int, ...]
    """Accepted tokens, then the correction or bonus: num_accepted + 1 ids. If a grammar gives up after an
    accepted draft token, that token is the last."""
    num_computed_tokens: int
    """Entries in the target's cache after truncation: always ledger length - 1."""
    timings: Timings = field(default_factory=Timings)
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One entry per token id if the request asks for log-probabilities."""
    went_on_with: int | None = None
    """None if the next round has not begun. Else the number of draft tokens (of a tree: nodes) it began with:
    the first ones of the VerifyAhead proposal for this outcome, or 0 if there was none."""
    forced_token_ids: tuple[int, ...] = ()
    """Tokens that the sequence's structured output leaves no choice about, behind `token_ids`."""
    accepted_nodes: tuple[int, ...] = ()
    """The accepted nodes of a tree, a path from its root; empty for a chain."""

    @property
    def outcome(self) -> Outcome:
        """The key of a proposal in VerifyAhead."""
        last = self.accepted_nodes[-1] if self.accepted_nodes else None
        return Outcome(self.num_accepted, self.token_ids[-1], last)
