"""Trees drafted ahead of the verdict on a tree: the rest of the same pool, in the same order of value.

A verdict on a tree is its last accepted node and the next token, which is no child of that node in the
proposal. Those are exactly the nodes of the pool that were not sent, below one that was, and their values are
their likelihoods. So after the proposal its leaves are fed too, and the likeliest nodes that were not sent
become roots of next rounds' trees, in the same region.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from draft_worker.lookahead.fanout import WORTH_DRAFTING
from draft_worker.sampling.draw import NoiseTape
from draft_worker.sampling.growth import ROOT, BestNodes, Row, path_of
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.trees.tree import DraftTree, NodeFeed
from paceline.core.messages import Continuations, DraftRound
from paceline.core.types import Outcome, Proposal


@dataclass(slots=True, eq=False)
class TreeOutcomes:
    """The likely outcomes of one round with a tree."""

    command: DraftRound
    tree: DraftTree
    """Of the round; it was answered."""
    depth: int
    """Of the trees that are drafted ahead."""
    ahead: dict[tuple[int, ...], tuple[Outcome, DraftTree]] = field(default_factory=dict)
    """By the tokens of the verdict."""
    unsent: dict[Outcome, Proposal] = field(default_factory=dict)
    """Complete trees that the coordinator does not have."""
    _leaves: list[int] = field(default_factory=list)
    """Sent nodes that are being fed."""
    _fed: set[int] = field(default_factory=set)
    """Sent nodes that were looked at as leaves; some have no row."""
    _begun: set[int] = field(default_factory=set)
    """Nodes with a tree."""

    @property
    def alive(self) -> bool:
        """False once the room of the states was freed."""
        return self.tree.region is not None

    def plan(self, width: int) -> tuple[list[int], list[int]]:
        """The likeliest leaves to feed and outcomes to begin trees for; no more than `width` trees in all.

        An outcome waits for likelier leaves, whose children may be likelier too.
        """
        pool, sent = self.tree.growth.pool, set(self.tree.sent)
        leaves = [n for n in self.tree.sent if n not in self.tree.states and n not in self._fed]
        outcomes = [
            n
            for n, node in enumerate(pool)
            if n not in sent and n not in self._begun and (node.parent == ROOT or node.parent in sent)
        ]
        room, chosen_leaves, chosen = self.tree.room, list[int](), list[int]()
        for node in sorted([*leaves, *outcomes], key=lambda n: -pool[n].value):
            cost = 1 if node in sent else 1 + self._growth().max_fed
            if pool[node].value < math.log(WORTH_DRAFTING) or cost > room:
                break
            if node in sent and len(chosen_leaves) < width:
                chosen_leaves.append(node)
            elif node not in sent and not chosen_leaves and len(self._begun) + len(chosen) < width:
                chosen.append(node)
            else:
                continue
            room -= cost
        return chosen_leaves, chosen

    def wants_passes(self, width: int) -> bool:
        """True while there is anything to draft for."""
        return self.alive and bool(self._growing or any(self.plan(width)))

    @property
    def _growing(self) -> list[DraftTree]:
        return [tree for _, tree in self.ahead.values() if not tree.complete]

    def _growth(self) -> BestNodes:
        return BestNodes(self.depth, self.tree.growth.shape)

    def feeds(self, width: int) -> list[NodeFeed]:
        """The nodes to feed next: leaves, and the newest levels of trees."""
        self._leaves, outcomes = self.plan(width)
        for node in outcomes:
            self._begin(node)
        self.tree.room -= len(self._leaves)
        grown = [feed for tree in self._growing for feed in tree.feeds()]
        return [*self.tree.feeds(self._leaves), *grown]

    def _begin(self, node: int) -> None:
        """Begin the tree of the round that follows if the verdict ends with this node's token."""
        pool, growth, before = self.tree.growth.pool, self._growth(), self.tree.root
        parent = pool[node].parent
        tokens = path_of(pool, node)
        ledger = (*before.ledger, *tokens)
        tape = NoiseTape.record(before.params, len(ledger), self.depth)
        root = PartialDraft(before.params, ledger, self.depth, tape, grammar=before.grammar)
        tree = DraftTree(self.tree.sequence_id, root, growth, None, above=self.tree.states[parent])
        last = None if parent == ROOT else self.tree.sent.index(parent)
        self.ahead[(*tokens,)] = Outcome(len(tokens) - 1, tokens[-1], last), tree
        self._begun.add(node)
        self.tree.room -= 1 + growth.max_fed

    def take(self, feeds: Sequence[NodeFeed], rows: Sequence[Row | None]) -> None:
        """The rows of `feeds`."""
        count = len(self._leaves)
        self._fed.update(self._leaves)
        self.tree.take_leaves(self._leaves, [feed.state for feed in feeds[:count]], rows[:count])
        self._leaves = []
        growing = [(outcome, tree) for outcome, tree in self.ahead.values() if not tree.complete]
        for _, tree in growing:
            end = count + len(tree.growth.wanted)
            tree.take([feed.state for feed in feeds[count:end]], rows[count:end])
            count = end
        done = {outcome: tree for outcome, tree in growing if tree.complete and tree.growth.pool}
        self.unsent |= {outcome: tree.growth.proposal() for outcome, tree in done.items()}

    def continuations(self) -> Continuations | None:
        """The complete trees that the coordinator does not have yet."""
        if not self.unsent:
            return None
        command, new = self.command, dict(self.unsent)
        self.unsent.clear()
        where = command.sequence_id, command.epoch, command.round, command.base_length
        return Continuations(*where, new)

    def foreseen(self, command: DraftRound, tokens: Sequence[int]) -> DraftTree | None:
        """The tree for the verdict that led to this ledger, if it answers the round that follows."""
        found = self.ahead.get((*tokens[len(self.tree.root.ledger) :],))
        if found is None or not self.alive:
            return None
        tree = found[1]
        fits = command.shape == tree.growth.shape and command.num_draft_tokens <= tree.root.k
        return tree if fits and tree.growth.pool else None
