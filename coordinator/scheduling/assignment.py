"""Which workers each sequence uses, and which workers hang. Pure.

A sequence keeps its target and its drafts until one is lost, leaves or hangs. routing.py chooses among
targets, quarantine.py holds sequences back that may kill them, and watchdog.py judges silent drafts.
"""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from coordinator.scheduling.block_waiters import Blocks
from coordinator.scheduling.quarantine import Suspects
from coordinator.scheduling.routing import PrefixRouter
from coordinator.scheduling.running_sequence import Running
from coordinator.scheduling.watchdog import Silence
from coordinator.sequence.messages import DraftLeft, DraftLost, DraftReady, Event, Signal
from coordinator.workers.links import Link
from paceline.core.clock import Clock
from paceline.core.messages import PromptLogprobs, RoundVerdict
from paceline.v1 import common_pb2

log = logging.getLogger(__name__)

STUCK_SHARE: Final = 0.5
"""Share of the target's deadline: a target that gave no verdict to any sequence for so long hangs."""


class Assignment:
    """The workers of one dispatcher. `Link.load` is the number of sequences that use a worker."""

    def __init__(
        self,
        sequences: Mapping[str, Running],
        blocks: Blocks,
        tell: Callable[[Running, Event], None],
        clock: Clock,
    ) -> None:
        """`sequences` belongs to the caller, by id; `tell` gives an event to one of them."""
        self.targets: list[Link] = []
        self.drafts: list[Link] = []
        self.leaving: list[Link] = []
        """Workers that keep their sequences and get no new ones."""
        self.router = PrefixRouter()
        self._sequences = sequences
        self._blocks = blocks
        self._tell = tell
        self._clock = clock
        self._suspects = Suspects(sequences)
        self._heard: dict[Link, float] = {}
        """When a target worker last gave a verdict, or a part of a prompt's report."""
        self._silences: defaultdict[Link, Silence] = defaultdict(Silence)
        """Of the draft workers."""

    @property
    def links(self) -> Sequence[Link]:
        """All links: targets, then drafts, then workers that get no new sequences."""
        return [*self.targets, *self.drafts, *self.leaving]

    # ---- workers come and go -----------------------------------------------------------------------

    def enter(self, link: Link) -> None:
        """The worker gets sequences from now on, or once it is ready."""
        if link in self.leaving:
            self.leaving.remove(link)
        self._peers(link).append(link)
        if link.ready:
            self.ready()

    def withdraw(self, link: Link) -> None:
        """The worker gets no new sequences. If it is stopping, others take its present ones."""
        self._peers(link).remove(link)
        self.leaving.append(link)
        self._hand_over()

    def forget(self, link: Link) -> None:
        """A leaving worker has no sequences any more."""
        self.leaving.remove(link)
        self._heard.pop(link, None)
        self.router.forget(link)
        self._silences.pop(link, None)

    def ready(self) -> None:
        """A worker became ready: sequences without a worker of its role take it, suspects last."""
        for running in sorted(self._sequences.values(), key=lambda running: running.state.losses):
            self.assign(running)
        self._hand_over()

    def take_lost(self, running: Running, link: Link) -> Event | None:
        """Take a lost worker from a sequence. Returns what to tell the sequence, None if it had another."""
        if running.target is link:
            running.target = None
            link.load -= 1
            return Signal.TARGET_LOST
        return DraftLost(self._take_draft(running, link)) if link in running.drafts else None

    def _peers(self, link: Link) -> list[Link]:
        return self.targets if link.role == "target" else self.drafts

    # ---- sequences take workers --------------------------------------------------------------------

    def assign(self, running: Running) -> None:
        """Give an admitted sequence the ready workers that it lacks.

        Drafts come first: the target's first round then finds that there are some.
        """
        if not running.admitted or running.ended:
            return
        wants_drafts = running.state.planner.num_speculative_tokens > 0
        for number, link in enumerate(running.drafts if wants_drafts else ()):
            if link is None and (draft := self._free_draft(running, number)) is not None:
                self._give_draft(running, number, draft)
        if running.target is None and self._suspects.holds_back(running):
            self.try_suspects()
        elif running.target is None and (target := self._nearest_target(running)) is not None:
            self._give_target(running, target)

    def release(self, running: Running) -> Link | None:
        """Take all workers from a sequence that has ended. Returns its target."""
        self._suspects.forget(running)
        target = running.target
        for link in filter(None, (target, *running.drafts)):
            link.load -= 1
        running.target, running.drafts = None, [None] * len(running.drafts)
        if target is not None:
            self._remember(running, target)
        return target

    def try_suspects(self) -> None:
        """Give a target to each suspect whose turn it is."""
        self._suspects.give_turns(self.targets, self._give_target)

    def sweep(self, now: float) -> None:
        """Periodic work for the suspects."""
        self.try_suspects()
        self._suspects.keep_waiting(self.targets, now)

    def _nearest_target(self, running: Running) -> Link | None:
        state = running.state
        return self.router.choose(self.targets, state.ledger.token_ids, state.params.cache_salt)

    def _remember(self, running: Running, target: Link) -> None:
        """Remember where the sequence's tokens are cached; with a single target there is no choice."""
        if len(self.targets) > 1:
            state = running.state
            self.router.sent(target, state.ledger.token_ids, state.params.cache_salt)

    def _give_target(self, running: Running, target: Link) -> None:
        running.target = target
        target.load += 1
        self._remember(running, target)
        if target.known is not None:
            planner, known = running.state.planner, target.known
            planner.target_max_len, planner.target_max_nodes = known.max_model_len, known.max_tree_nodes
        self._tell(running, Signal.TARGET_READY)

    def _give_draft(self, running: Running, number: int, link: Link) -> None:
        running.drafts[number] = link
        link.load += 1
        draft, known = running.state.drafts[number], link.known or common_pb2.WorkerInfo()
        draft.max_len, draft.max_nodes = known.max_model_len, known.max_tree_nodes
        draft.sub_drafted = bool(known.sub_drafter)
        self._tell(running, DraftReady(number))

    def _free_draft(self, running: Running, number: int) -> Link | None:
        """A draft for this place of a sequence: of a model that the others have not, then the least loaded.

        A draft that may hang gets a single sequence, to find out. Where the target decides, drafts of one
        model would propose the same: a further one of that model is not worth its time.
        """
        others = [link for i, link in enumerate(running.drafts) if link is not None and i != number]
        models = {_model_of(link) for link in others}

        def cost(link: Link) -> tuple[bool, bool, int, bool]:
            silence = self._silences[link]
            doubtful = silence.deadlines > 0 or silence.hang_ups > 0
            return _model_of(link) in models, doubtful and link.load > 0, link.load, doubtful

        free = [link for link in self.drafts if link.ready and link not in others]
        if running.state.params.target_decides:
            free = [link for link in free if _model_of(link) not in models]
        return min(free, key=cost, default=None)

    # ---- sequences change live workers -------------------------------------------------------------

    def _hand_over(self) -> None:
        """Move the sequences of workers that are stopping to workers that are not, where there are any."""
        stopping = {link for link in self.leaving if link.draining and link.load}
        if not stopping:
            return
        for running in list(self._sequences.values()):
            for number, link in enumerate(running.drafts):
                if link in stopping and self._free_draft(running, number) is not None:
                    self._leave_draft(running, link)
            if running.target in stopping and any(link.ready for link in self.targets):
                self._leave_target(running)

    def _leave_draft(self, running: Running, link: Link) -> None:
        """Take a sequence from a live draft and give it another one."""
        self._tell(running, DraftLeft(running.drafts.index(link)))
        if not running.ended:
            self._take_draft(running, link)
            self.assign(running)

    @staticmethod
    def _take_draft(running: Running, link: Link) -> int:
        """Take a draft from a sequence. Returns its place among the sequence's drafts."""
        number = running.drafts.index(link)
        running.drafts[number] = None
        link.load -= 1
        return number

    def _leave_target(self, running: Running) -> None:
        """Take a sequence from a live target and give it another one, which computes its prefix again."""
        link = running.target
        assert link is not None
        self._tell(running, Signal.TARGET_LEFT)
        if not running.ended:
            running.target = None
            link.load -= 1
            self._blocks.wake_oldest(link)
            self.assign(running)

    # ---- workers that hang -------------------------------------------------------------------------

    def heard(self, link: Link, events: Iterable[Any]) -> None:
        """The worker has answered."""
        if link in self.drafts or link in self._silences:
            self._silences[link] = Silence(self._clock())  # any answer shows that it is alive
        elif any(isinstance(event, RoundVerdict | PromptLogprobs) for event in events):
            self._heard[link] = self._clock()

    def drafts_late(self, links: Iterable[Link], sent_at: float, deadline: float) -> None:
        """Drafts asked at `sent_at` have not answered by `deadline`: restart the links of those that hang.

        A draft that hangs loses all its sequences and is ready again once its engine answers. A draft that is
        late for one sequence alone is only paused, by the round machine.
        """
        for link in links:
            if self._silences[link].is_too_long(sent_at, deadline):
                link.hang_up()

    def target_late(self, running: Running) -> None:
        """A sequence's target did not answer in time. Find out whether it hangs.

        A target that answers other sequences is alive. Then this one stays, unless another target would be
        less loaded even with this sequence.
        """
        link = running.target
        if link is None:
            return
        silent = self._clock() - self._heard.get(link, -math.inf)
        if silent > STUCK_SHARE * running.state.deadlines.target:
            self._tell(running, Signal.TARGET_LOST)
            link.hang_up()
            return
        log.warning("the target worker at %s is late for one sequence", link.address)
        if all(other.load + 1 >= link.load for other in self.targets if other.ready):
            self._tell(running, Signal.TARGET_LATE)
            return
        self._leave_target(running)


def _model_of(link: Link) -> str:
    """Distinguishes the models of drafts; one without weights is known by its address."""
    fingerprint = link.known.model_fingerprint if link.known is not None else ""
    return fingerprint or link.address
