"""The trees of a worker's sequences: they grow together, and stay until the next round of their sequence.

The entries of a tree's nodes lie in a region of branches beside the sequence. When the next round comes,
those of the accepted path become the sequence's, so accepted tokens are not fed again.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from draft_worker.drafters.interface import BranchRegion, BranchState, Drafter
from draft_worker.sampling.drawn_nodes import DrawnNodes
from draft_worker.sampling.growth import ROOT, BestNodes, Growth, Row
from draft_worker.sampling.partial_draft import PartialDraft
from draft_worker.sampling.sampler import TokenSampler
from draft_worker.trees.tree import DraftTree, NodeFeed
from paceline.core.errors import ResourceExhaustedError
from paceline.core.messages import DraftProposal
from paceline.core.types import TreeShape
from paceline.engine.scheduling.passes import own_error
from paceline.engine.scheduling.sequences import HeldSequence

log = logging.getLogger(__name__)

Held = HeldSequence[DraftProposal]


class Trees:
    """At most one tree of each sequence, by its id."""

    def __init__(
        self, drafter: Drafter, sampler: TokenSampler, max_rows: int, spare: Callable[[], bool]
    ) -> None:
        """`max_rows`: most rows of a pass. `spare` frees room that no round waits for; False if none."""
        self._drafter = drafter
        self._sampler = sampler
        self._max_rows = max_rows
        self._spare = spare
        self._by_sequence: dict[str, DraftTree] = {}

    def begin(self, held: Held, root: PartialDraft, shape: TreeShape, more: int = 0) -> DraftTree | None:
        """A tree of a sequence that has taken in its ledger. The row after it is the first to grow by.

        None if there is no room for the tree's nodes. `more`: entries wanted beside those, if there is room.
        """
        growth, sequence_id = _growth_of(root, shape), held.session.sequence_id
        room = self._room(growth.max_fed, more)
        region = self._fork(held, growth.max_fed + room)
        if region is None:
            return None
        root = replace(root, ledger=tuple(root.ledger))  # the session's own list grows
        states = {ROOT: region.branch(held.num_computed_tokens)}
        tree = DraftTree(sequence_id, root, growth, region, states, room=room)
        self._by_sequence[sequence_id] = tree
        return tree

    def replant(self, held: Held, tree: DraftTree, more: int) -> bool:
        """Make a tree that was drafted ahead in a sequence's region that of its round; False if it cannot be.

        Its root becomes the sequence's, and its other states move to a region of their own; without room for
        one, it stays as it stands. The old region is freed.
        """
        old = self._by_sequence.pop(held.session.sequence_id)
        held.cut_to_ledger()
        done = held.num_computed_tokens == len(old.root.ledger) and self._adopt(held, tree.states[ROOT])
        if done:
            room = self._room(tree.growth.max_fed, more)
            tree.region, moved = self._fork(held, tree.growth.max_fed + room), tree.states
            tree.states, tree.above, tree.room = {}, None, room
            self._by_sequence[held.session.sequence_id] = tree
            if tree.region is None:
                tree.stop()
            else:
                self._move(tree, tree.region.branch(held.num_computed_tokens), moved)
        old.free()
        return done

    def _move(self, tree: DraftTree, root: BranchState, states: Mapping[int, BranchState]) -> None:
        """Copy states of a tree to the region of its root."""
        tree.states[ROOT] = root
        for node in sorted(states.keys() - {ROOT}):
            above = tree.states[tree.growth.pool[node].parent]
            state = tree.states[node] = above.cut(above.length)
            self._drafter.extend_branch(state, states[node], 1)

    def _room(self, needed: int, more: int) -> int:
        """How many of `more` entries to take beside those that are needed: others want room too."""
        return max(0, min(more, self._drafter.free_entries // 2 - needed))

    def _fork(self, held: Held, entries: int) -> BranchRegion | None:
        with contextlib.suppress(ResourceExhaustedError):
            return self._drafter.fork(held, entries)
        if self._spare():
            with contextlib.suppress(ResourceExhaustedError):
                return self._drafter.fork(held, entries)
        return None

    @property
    def regions(self) -> list[BranchRegion]:
        """All regions that trees hold."""
        return [tree.region for tree in self._by_sequence.values() if tree.region is not None]

    def grow(self, trees: Sequence[DraftTree]) -> int:
        """NodeFeed the wanted nodes of all these trees; returns their number. A tree that fails alone stops.

        Raises the error of a device that can no longer compute.
        """
        rows = sum(len(tree.growth.wanted) for tree in trees)
        failed = False
        try:
            self._grow(trees)
        except Exception:
            log.exception("growing %d trees together failed; continuing one by one", len(trees))
            failed = True
        # Not inside the exception handler: the traceback keeps the tensors of the pass.
        for tree in trees if failed else ():
            try:
                self._grow([tree])
            except Exception as error:
                own_error(error, "growing a draft tree", tree.sequence_id)  # sent as it stands
                tree.stop()
        return rows

    def _grow(self, trees: Sequence[DraftTree]) -> None:
        feeds = [tree.feeds() for tree in trees]
        width = max(tree.growth.shape.width for tree in trees)
        taken = iter(self.rows_of([feed for of_tree in feeds for feed in of_tree], width))
        for tree, of_tree in zip(trees, feeds, strict=True):
            tree.take([feed.state for feed in of_tree], [next(taken) for _ in of_tree])

    def rows_of(self, feeds: Sequence[NodeFeed], width: int) -> list[Row | None]:
        """Feed nodes of trees of up to this width; what may follow each."""
        rows = list[Row | None]()
        for first in range(0, len(feeds), self._max_rows):
            states, drafts = zip(*feeds[first : first + self._max_rows], strict=True)
            logits = self._drafter.step_branches(states, [draft.newest for draft in drafts])
            rows += self._sampler.rows(drafts, logits, width)
        return rows

    def adopt(self, held: Held) -> None:
        """Cut a sequence to its ledger, and take over what its tree has of the ledger's newest tokens.

        The tree is freed.
        """
        tree = self._by_sequence.pop(held.session.sequence_id, None)
        held.cut_to_ledger()
        if tree is None:
            return
        tokens, base = held.session.tokens, len(tree.root.ledger)
        state = tree.deepest(tokens) if held.num_computed_tokens == base else None
        if state is not None:
            self._adopt(held, state)
        tree.free()

    def _adopt(self, held: Held, state: BranchState) -> bool:
        """Make a state the sequence's. What it lacks after a failure is fed again."""
        try:
            self._drafter.adopt(held, state)
        except Exception as error:
            held.cut_to(held.num_computed_tokens)
            own_error(error, "adopting a draft tree", held.session.sequence_id)
            return False
        held.session.cached = held.session.tokens[: held.num_computed_tokens]
        return True

    def release(self, sequence_id: str) -> None:
        """Free a sequence's tree, if any."""
        tree = self._by_sequence.pop(sequence_id, None)
        if tree is not None:
            tree.free()

    def free(self) -> bool:
        """Free all trees; False if there were none. One in progress is complete as it stands."""
        return self._free(list(self._by_sequence))

    def free_idle(self) -> bool:
        """Free the trees that no round waits for."""
        return self._free([name for name, tree in self._by_sequence.items() if tree.complete])

    def _free(self, sequence_ids: Sequence[str]) -> bool:
        for sequence_id in sequence_ids:
            self.release(sequence_id)
        return bool(sequence_ids)


def _growth_of(root: PartialDraft, shape: TreeShape) -> Growth:
    uniforms = root.tape.uniforms
    return BestNodes(root.k, shape) if uniforms is None else DrawnNodes(root.k, shape, uniforms.tolist())
