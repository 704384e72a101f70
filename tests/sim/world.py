"""A whole service in one thread, on a simulated clock.

Real: the dispatcher, round machines, ledgers, wire frames, engine threads' routing (stepped by hand),
target engine, draft engine, sessions, block tables. Toy: the models, the network, the processes and the
clients. Everything random comes from one seed, so that a failing run can be run again.
"""

from __future__ import annotations

import heapq
import itertools
import os
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from unittest import mock

import coordinator.scheduling.dispatcher as dispatcher_module
from coordinator.proposers.finished_texts import FinishedTexts
from coordinator.proposers.registry import SourceSetting, make_sources
from coordinator.proposers.suffix import SuffixSettings
from coordinator.round.machine import RoundMachine
from coordinator.round.state import RoundState
from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.running_sequence import Running
from coordinator.sequence.ledger import Commit, Finish, Ledger
from coordinator.sequence.messages import Deadlines, Phase
from coordinator.speculation.arms import DraftArm
from coordinator.speculation.controller import Controller
from coordinator.speculation.policy import FixedLength, GoodputPolicy
from draft_worker.engine import DraftEngine
from paceline.core import limits
from paceline.core.clock import ManualClock
from paceline.core.config import NO_SUB_DRAFTER, DraftConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.messages import DraftRound, RoundVerdict, SequenceFailed, VerifyAhead, VerifyRound
from paceline.core.types import (
    CHAIN,
    AcceptanceMode,
    SamplingParams,
    SequenceParams,
    TokenLogprobs,
    TreeShape,
)
from paceline.core.validation import AUTO, DraftTokens
from paceline.engine.multi_step import ChainSkills
from paceline.engine.scheduling.engine_thread import EngineThread
from paceline.rpc.streams import frames
from paceline.v1 import common_pb2
from target_worker.engine import TargetEngine
from tests.sim.caches import CacheChecker, branch_tables
from tests.sim.reference import LetterDetokenizer
from tests.sim.toys import ToyModel, ToyRunner, draft_config, draft_engine, target_config

TICK = 0.005
"""Seconds between two sweeps of the deadlines."""
STEP = (0.0002, 0.002)
"""Least and most seconds of a worker's step; a target's are multiplied by its slowness."""
DEADLINES = Deadlines(draft=0.02, target=0.1, recovery=5.0)
MAX_K = 6
"""The most draft tokens where the policy chooses."""
ENDLESS = 120.0
"""Simulated seconds after which a run that has not ended is a failure."""
SEEDS = os.environ.get("PACELINE_SIM_SEEDS", "")


def chosen_seeds(default: int) -> range:
    """PACELINE_SIM_SEEDS=17 runs one seed alone, PACELINE_SIM_SEEDS=0:5000 a range."""
    if not SEEDS:
        return range(default)
    first, colon, last = SEEDS.partition(":")
    return range(int(first or 0), int(last) if colon else int(first) + 1)


def brief(message: Any) -> str:
    """A command or event in one short line."""
    names = ("sequence_id", "epoch", "round", "base_length", "committed_tail", "num_draft_tokens", "error")
    parts = [f"{name}={getattr(message, name)!r}" for name in names if hasattr(message, name)]
    for name in ("verdict", "proposal"):
        if (part := getattr(message, name, None)) is not None:
            parts.append(f"{name}={part.token_ids}")
    return f"{type(message).__name__}({' '.join(parts)})"


class SimulationError(AssertionError):
    """A property does not hold; says how to see it again."""


class SteppedEngine(EngineThread[Any, Any]):
    """The engine thread's own code without the thread: a step takes up what is there, then its time."""

    def take_up(self) -> None:
        self._engine.reset_cancel()
        while not self._inbox.empty():
            task = self._inbox.get_nowait()
            assert task is not None
            task()
            self._flush()

    def step(self) -> None:
        if self._engine.has_work:
            self._send(self._engine.step())
            self._flush()

    @property
    def waits(self) -> bool:
        return self._engine.has_work or not self._inbox.empty()


@dataclass(eq=False)
class SimWorker:
    """One worker process."""

    world: World
    role: str
    model: ToyModel
    num_blocks: int
    max_sequences: int
    max_model_len: int = 64
    hung_until: float = 0.0
    stepping: bool = False

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """A new process: nothing of the old one is left."""
        self.runner = ToyRunner(self.model, self.num_blocks)
        # One world in four has drafts that draw what they can by themselves as on a GPU, one as on a CPU,
        # where a command that waits ends a chain; half of the latter do not look ahead. There a target's
        # passes can be given up, so it computes what it is not asked for yet.
        on_cpu, on_gpu = self.world.seed % 4 == 3, self.world.seed % 4 == 1
        if on_cpu or on_gpu:
            self.runner.chain_skills = ChainSkills(max_feed=16 if on_cpu else 2)
            self.runner.cancellable = on_cpu
            self.runner.stops = lambda _: on_cpu and self.world.rng.random() < 0.2
        self.answered: set[tuple[str, int, int]] = set()
        self.caches = CacheChecker(always=self.world.checks)
        core = TargetEngine if self.role == "target" else draft_engine
        self.core: Any = core(
            self.runner,
            self._config(),
            vocabulary_size=self.model.vocab_size,
            max_model_len=self.max_model_len,
            eos_token_ids=self.world.eos,
            clock=self.world.clock,
        )
        self.engine = SteppedEngine(self.core, self.role, self.world.clock)
        self.stepping = False

    def _config(self) -> DraftConfig | TargetConfig:
        bounds = {"max_sequences": self.max_sequences, "max_batch_tokens": self.world.batch}
        if self.role == "target":
            return target_config(**bounds)
        branches = 0 if self.world.seed % 8 == 3 else 24
        return draft_config(**bounds, lookahead_branches=branches, sub_drafter=self.world.sub_drafter)

    def wake(self) -> None:
        if not self.stepping:
            self.stepping = True
            self._begin(self.engine)

    def _hangs(self, go_on: Callable[[SteppedEngine], None], engine: SteppedEngine) -> bool:
        if self.world.clock() < self.hung_until:
            self.world.after(self.hung_until - self.world.clock(), go_on, engine)
            return True
        return False

    def _begin(self, engine: SteppedEngine) -> None:
        if engine is not self.engine or self._hangs(self._begin, engine):
            return
        engine.take_up()
        world = self.world
        slowness, step = (world.target_slowness, STEP) if self.role == "target" else (1.0, world.draft_step)
        world.after(slowness * world.rng.uniform(*step), self._end, engine)

    def _end(self, engine: SteppedEngine) -> None:
        if engine is not self.engine or self._hangs(self._end, engine):
            return
        self.stepping = False
        engine.step()
        if self.world.checks:
            self.check()
        if engine.waits:
            self.wake()

    def check(self) -> None:
        """Between two steps."""
        branches = branch_tables(self.core) if isinstance(self.core, DraftEngine) else []
        self.caches.check(self.runner, self.core.sequences, branches)


class SimStream:
    """One bidirectional stream; in order both ways, and nothing arrives after its end."""

    def __init__(self, link: SimLink) -> None:
        self.link = link
        self.world = link.world
        self.engine = link.worker.engine
        self.arrived = {"up": 0.0, "down": 0.0}
        self.route: Callable[[Sequence[Any]], None] = self._answer

    def later(self, way: str, call: Callable[..., None], *args: Any) -> None:
        world = self.world
        at = max(self.arrived[way], world.clock() + world.delay())
        self.arrived[way] = at
        world.at(at, call, *args)

    def deliver(self, frame: Any) -> None:
        worker = self.link.worker
        if self.engine is not worker.engine:
            return  # that process is gone
        parse = frames.target_commands if worker.role == "target" else frames.draft_commands
        self.engine.submit(self.route, parse(frame))
        worker.wake()

    def leave(self) -> None:
        if self.engine is self.link.worker.engine:
            self.engine.leave(self.route)
            self.link.worker.wake()

    def _answer(self, events: Sequence[Any]) -> None:
        world, worker = self.world, self.link.worker
        for event in events:
            if isinstance(event, RoundVerdict):
                world.check_verdict(worker, event)
        render, parse = (
            (frames.verify_response, frames.target_events)
            if worker.role == "target"
            else (frames.draft_response, frames.draft_events)
        )
        frame = render(list(events))
        copies = 2 if world.happens(world.faults.duplicates) else 1
        for _ in range(copies):
            self.later("down", self._receive, parse, frame)

    def _receive(self, parse: Callable[[Any], Sequence[Any]], frame: Any) -> None:
        if self.link.stream is self:
            self.world.receive(self.link, parse(frame))


class SimLink:
    """What the dispatcher needs of a Link."""

    def __init__(self, world: World, worker: SimWorker, name: str) -> None:
        self.world = world
        self.worker = worker
        self.name = self.address = name
        self.role = worker.role
        self.load = 0
        sub_drafter = "" if world.sub_drafter == NO_SUB_DRAFTER else world.sub_drafter
        self.known = common_pb2.WorkerInfo(
            max_model_len=worker.max_model_len,
            sub_drafter=sub_drafter,
            max_tree_nodes=worker.core.max_tree_nodes,
            model_fingerprint=f"model {id(worker.model)}",
        )
        self.stream: SimStream | None = None
        self.outbox: list[Any] = []
        self.gone_for_good = False
        self.draining = False

    @property
    def ready(self) -> bool:
        return self.stream is not None

    def connect(self) -> None:
        if self.stream is None and not self.gone_for_good:
            self.stream = SimStream(self)
            self.outbox.clear()
            self.world.note(f"{self.name} is ready")
            if self.draining:
                self.draining = False
                self.world.dispatcher.link_entered(self)  # type: ignore[arg-type]
            self.world.dispatcher.link_ready(self)  # type: ignore[arg-type]

    def send(self, command: Any) -> None:
        if self.stream is None:
            return
        if not self.outbox:
            self.world.after(0.0, self._leave, self.stream)
        self.outbox.append(command)

    def flush(self) -> None:
        if self.stream is not None:
            self._leave(self.stream)

    def _leave(self, stream: SimStream) -> None:
        if stream is not self.stream or not self.outbox:
            return
        commands, self.outbox = self.outbox, []
        world = self.world
        world.note(f"{self.name} <- {', '.join(map(brief, commands))}")
        request = frames.verify_request if self.worker.role == "target" else frames.draft_request
        stream.later("up", stream.deliver, request(commands))
        if world.happens(world.faults.duplicates):
            rounds = [c for c in commands if isinstance(c, VerifyRound | VerifyAhead | DraftRound)]
            stream.later("up", stream.deliver, request(rounds))

    def hang_up(self) -> None:
        self.world.after(0.0, self.cut)

    def cut(self, back_after: float | None = None) -> None:
        """The stream ends. The worker hears of it sooner or later, after what is still under way."""
        if self.stream is None:
            return
        world, stream = self.world, self.stream
        self.stream = None
        self.outbox.clear()
        world.note(f"{self.name} is lost")
        world.at(max(stream.arrived["up"], world.clock() + world.rng.uniform(0, 0.03)), stream.leave)
        world.after(world.rng.uniform(0.0, 0.06) if back_after is None else back_after, self.connect)
        world.dispatcher.link_lost(self)  # type: ignore[arg-type]

    def drain(self, seconds: float, down_for: float) -> None:
        """The process says that it is stopping, and is replaced later."""
        if self.stream is not None and not self.draining:
            self.draining = True
            self.world.dispatcher.link_leaving(self)  # type: ignore[arg-type]
            self.world.after(seconds, self.restart, down_for)

    def restart(self, down_for: float) -> None:
        """The process dies and another one starts."""
        self.worker.start()
        self.cut(down_for)


@dataclass
class Faults:
    """What goes wrong, and how often."""

    duplicates: float = 0.0
    """Chance that a round, or a frame of answers, arrives twice."""
    slowest: float = 0.002
    """Longest way between two processes, in seconds."""
    events: list[tuple[float, str]] = field(default_factory=list)
    """(when, what)."""


@dataclass
class Request:
    """One client and what it wants."""

    sequence_id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    mode: AcceptanceMode = AcceptanceMode.COUPLED
    bad_words: tuple[tuple[int, ...], ...] = ()
    k: DraftTokens = 3
    sources: tuple[str, ...] = ()
    tree: TreeShape = CHAIN
    """With a fixed K."""
    drafts: int = 1
    """Draft workers that propose for one round."""
    draft_changes: Mapping[str, Any] = field(default_factory=dict)
    """What the draft draws with instead of the request's sampling."""
    cache_salt: str = ""
    arrives: float = 0.0
    reads_every: float = 0.001
    reads_at_once: int = 100
    leaves_at: float | None = None


@dataclass(eq=False)
class Client:
    """Reads its stream and believes nothing."""

    request: Request
    running: Running | None = None
    refused: PacelineError | None = None
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finish | None = None
    error: PacelineError | None = None
    left: bool = False
    most_unread: int = 0

    @property
    def done(self) -> bool:
        return self.left or self.refused is not None or self.finish is not None or self.error is not None

    def take(self, part: Commit | PacelineError) -> None:
        if self.finish is not None or self.error is not None:
            raise SimulationError("invariant 2: something came after the end")
        if isinstance(part, PacelineError):
            self.error = part
            return
        if part.index != len(self.token_ids):
            raise SimulationError(f"invariant 2: index {part.index} after {len(self.token_ids)} tokens")
        if len(part.origins) != len(part.token_ids):
            raise SimulationError("invariant 2: tokens without origins")
        if bool(part.token_ids) == bool(part.prompt_logprobs) or (self.token_ids and part.prompt_logprobs):
            raise SimulationError("invariant 2: an empty part, or one of the prompt behind a token")
        self.prompt_logprobs.extend(part.prompt_logprobs)
        self.logprobs.extend(part.logprobs)
        self.token_ids.extend(part.token_ids)
        self.text += part.text
        self.finish = part.finish


def experienced_controller() -> Controller:
    """One that has found drafting worth while, so that short runs draft."""
    controller = Controller(MAX_K)
    for power in range(12):
        for k in range(MAX_K + 1):
            for _ in range(10):
                controller.costs.add(DraftArm(k), 0.001 * (k > 0), 0.006 + 0.0002 * k, 2**power)
    return controller


class CheckedDispatcher(Dispatcher):
    """Looks at every part as it is emitted."""

    def _emit(self, running: Running, commit: Commit) -> None:
        ledger = running.state.ledger
        start = ledger.prompt_length + commit.index
        if tuple(ledger.token_ids[start:]) != commit.token_ids:
            raise SimulationError(f"invariant 2: {commit.token_ids} was emitted and is not committed")
        super()._emit(running, commit)


class World:
    """Workers, network, coordinator and clients."""

    def __init__(
        self,
        seed: int,
        *,
        target: ToyModel,
        draft: ToyModel | Sequence[ToyModel],
        num_targets: int = 1,
        num_drafts: int = 1,
        target_blocks: int = 200,
        draft_blocks: int = 200,
        max_sequences: int = 600,
        max_running: int = 600,
        max_waiting: int = 600,
        max_unread: int = 1024,
        faults: Faults | None = None,
        eos: tuple[int, ...] = (),
        max_model_len: int = 64,
        draft_max_len: int = 64,
        batch: int = 40,
        checks: bool = True,
        sub_drafter: str | None = None,
    ) -> None:
        """With several `draft` models, draft workers have them in turn."""
        self.rng = random.Random(seed)
        self.seed = seed
        models = [draft] if isinstance(draft, ToyModel) else draft
        self.clock = ManualClock()
        self.faults = faults or Faults()
        self.eos = eos
        self.target_model = target
        self.max_model_len = max_model_len
        self.max_unread = max_unread
        self.trace: deque[str] = deque(maxlen=40)
        self.calendar: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._tie = itertools.count()
        self.controller = experienced_controller()
        self.finished = FinishedTexts(most_answers=20)
        self.dispatcher = CheckedDispatcher(max_running, max_waiting, self.clock)
        self.batch = batch
        self.checks = checks
        self.sub_drafter = sub_drafter or ("ngram" if seed % 3 == 2 else NO_SUB_DRAFTER)
        """Of the drafts; one world in three has one unless told otherwise."""
        self.draft_step = STEP
        self.verdicts_checked = 0
        self.went_on = 0
        """Rounds that a target began by itself."""
        self.target_slowness = random.Random(f"slowness {seed}").choice((1.0, 6.0, 12.0))
        """A target's step over a draft's: the slower, the more is drafted ahead in time."""
        self.clipped = 0
        self.targets = [
            SimLink(
                self, SimWorker(self, "target", target, target_blocks, max_sequences, max_model_len), f"T{i}"
            )
            for i in range(num_targets)
        ]
        self.drafts = [
            SimLink(
                self, SimWorker(self, "draft", model, draft_blocks, max_sequences, draft_max_len), f"D{i}"
            )
            for i, model in zip(range(num_drafts), itertools.cycle(models), strict=False)
        ]
        self.dispatcher.workers.targets = list(self.targets)  # type: ignore[arg-type]
        self.dispatcher.workers.drafts = list(self.drafts)  # type: ignore[arg-type]
        self.clients: list[Client] = []
        self._sweep = self.dispatcher.sweep()

    # ---- time and chance ---------------------------------------------------------------------------

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self.calendar, (when, next(self._tie), call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        self.at(self.clock() + seconds, call, *args)

    def happens(self, chance: float) -> bool:
        return chance > 0 and self.rng.random() < chance

    def delay(self) -> float:
        return self.rng.uniform(0.0001, self.faults.slowest)

    def note(self, text: str) -> None:
        self.trace.append(f"{self.clock():.4f} {text}")

    # ---- what must hold at every step --------------------------------------------------------------

    def check_verdict(self, worker: SimWorker, event: RoundVerdict) -> None:
        """Invariant 1, as the worker answers."""
        self.went_on += event.verdict.went_on_with is not None
        if not self.checks:
            return
        place = (event.sequence_id, event.epoch, event.round)
        again = place in worker.answered
        worker.answered.add(place)
        held = worker.core.sequences.find(event.sequence_id)
        if again and held is not None and not held.table.length:
            return  # preempted since
        if held is None or held.session.epoch != event.epoch:
            return
        if again and (event.sequence_id in worker.core._rounds or held.session.round != event.round):
            return  # a repetition; the sequence has moved on
        # Since an answer that is repeated, the last token may have been fed ahead of the next round.
        ahead = again and held.table.length == len(held.session.tokens)
        confirmed = len(held.session.tokens) - 1
        if not (held.table.length - ahead == confirmed == event.verdict.num_computed_tokens):
            raise SimulationError("invariant 1: the target's cache is not the ledger without its last token")
        if worker.runner.read(held.table) != held.session.tokens[: held.table.length]:
            raise SimulationError("invariant 1: the target's cache does not hold the ledger")
        self.verdicts_checked += not again

    def receive(self, link: SimLink, events: Iterable[Any]) -> None:
        """Invariant 3, as the coordinator takes answers in; and no worker finds a round wrong.

        That it does would be hidden: the round is put again without its proposal.
        """
        for event in events:
            self.note(f"{link.name} -> {brief(event)}")
            if isinstance(event, SequenceFailed) and isinstance(event.error, InvalidArgumentError):
                raise SimulationError(f"{link.name} refused what it was asked: {event.error}")
            running = self.dispatcher._sequences.get(event.sequence_id)
            ledger = running.state.ledger if running is not None else None
            before = list(ledger.token_ids) if ledger is not None else []
            self.dispatcher.link_events(link, [event])  # type: ignore[arg-type]
            if ledger is None or ledger.token_ids == before:
                continue
            added = tuple(ledger.token_ids[len(before) :])
            if not isinstance(event, RoundVerdict) or ledger.token_ids[: len(before)] != before:
                raise SimulationError("invariant 3: something other than a verdict changed the ledger")
            verdict = event.verdict
            whole = added == verdict.token_ids
            self.clipped += not whole
            if not whole and not (ledger.ended and verdict.token_ids[: len(added)] == added):
                raise SimulationError(f"invariant 3: {verdict.token_ids} was committed as {added}")
            if whole and verdict.num_computed_tokens != len(ledger) - 1:
                raise SimulationError("invariant 1: num_computed_tokens is not the ledger length - 1")

    # ---- clients -----------------------------------------------------------------------------------

    def machine(self, request: Request) -> RoundMachine:
        ledger = Ledger(
            request.prompt,
            request.sampling,
            detokenizer=LetterDetokenizer(),
            eos_token_ids=frozenset(self.eos),
            max_model_len=self.max_model_len,
        )
        policy = (
            GoodputPolicy(self.controller, MAX_K)
            if request.k == AUTO
            else FixedLength(self.controller, request.k, tree=request.tree)
        )
        setting = SourceSetting(
            # Matches are short here, and guesses are to be long.
            suffix=SuffixSettings(max_spec_factor=4, min_token_prob=0.02),
            finished=self.finished,
            salt=request.cache_salt,
            prompt_length=len(request.prompt),
        )
        params = SequenceParams(
            request.sampling, request.mode, len(request.prompt), request.bad_words, request.cache_salt
        )
        state = RoundState(
            request.sequence_id,
            ledger,
            params,
            MAX_K if request.k == AUTO else request.k,
            policy,
            DEADLINES,
            self.target_model.vocab_size,
            self.max_model_len,
            sources=make_sources(request.sources, setting) if request.k else (),
            draft_params=replace(params, sampling=replace(request.sampling, **request.draft_changes)),
            num_drafts=request.drafts,
            deadline=self.clock() + DEADLINES.recovery,
        )
        return RoundMachine(state)

    def submit(self, request: Request) -> Client:
        client = Client(request)
        self.clients.append(client)
        self.at(request.arrives, self._arrive, client)
        return client

    def _arrive(self, client: Client) -> None:
        request = client.request
        try:
            client.running = self.dispatcher.submit(self.machine(request))
        except PacelineError as error:
            client.refused = error
            return
        self.after(request.reads_every, self._read, client)
        if request.leaves_at is not None:
            self.at(request.leaves_at, self._leave, client)

    def _read(self, client: Client) -> None:
        running = client.running
        client.most_unread = max(client.most_unread, running.unread)
        for _ in range(client.request.reads_at_once):
            if client.done or running.parts.empty():
                break
            try:
                self.dispatcher.next_part(running).send(None)
            except StopIteration as part:
                client.take(part.value)
        if client.done:
            self.dispatcher.cancel(running)  # as Coordinator.parts does
        else:
            self.after(client.request.reads_every, self._read, client)

    def _leave(self, client: Client) -> None:
        if not client.done and client.running is not None:
            client.left = True
            self.dispatcher.cancel(client.running)
            if client.running.state.phase is not Phase.DONE:
                raise SimulationError("a cancelled request goes on")

    # ---- the run -----------------------------------------------------------------------------------

    def run(self) -> None:
        """Until every client is done and nothing is under way; then what must hold at rest."""
        with (
            mock.patch.object(dispatcher_module, "SWEEP_SECONDS", 0),
            mock.patch.object(limits, "MAX_UNREAD_TOKENS", self.max_unread),
        ):
            try:
                self._run()
            except Exception as error:
                trace = "\n".join(self.trace)
                raise SimulationError(
                    f"{type(error).__name__}: {error}\nseed {self.seed}; replay it alone with "
                    f"PACELINE_SIM_SEEDS={self.seed}\nlast events:\n{trace}"
                ) from error
            finally:
                self._sweep.close()

    def _run(self) -> None:
        for link in [*self.targets, *self.drafts]:
            self.after(self.rng.uniform(0, 0.004), link.connect)
        for when, what in self.faults.events:
            self.at(when, self.strike, what)
        self._sweep.send(None)
        self.at(TICK, self._tick)
        while self.calendar:
            when, _, call, args = heapq.heappop(self.calendar)
            self.clock.now = max(self.clock.now, when)
            call(*args)
        unfinished = [c.request.sequence_id for c in self.clients if not c.done]
        if unfinished:
            raise SimulationError(f"{unfinished} never ended")
        self._check_rest()

    def _tick(self) -> None:
        if all(client.done for client in self.clients):
            return
        if self.clock() > ENDLESS:
            phases = {k: r.state.phase for k, r in self.dispatcher._sequences.items()}
            raise SimulationError(f"after {ENDLESS} seconds: {phases}")
        self._sweep.send(None)
        self.after(TICK, self._tick)

    def _check_rest(self) -> None:
        controller = self.controller
        if controller.sequences or controller.reading:
            raise SimulationError(f"the policy still counts {controller.sequences} sequences")
        if self.dispatcher.running or self.dispatcher.waiting or self.dispatcher._sequences:
            raise SimulationError("the dispatcher still holds sequences")
        for link in [*self.targets, *self.drafts]:
            if link.load:
                raise SimulationError(f"{link.name} is thought to have {link.load} sequences")
            link.worker.check()
            pool = link.worker.runner.pool
            if len(link.worker.core.sequences) or pool.used_blocks or pool.free_blocks != pool.num_blocks:
                raise SimulationError(f"invariant 5: {link.name} still has {pool.used_blocks} blocks in use")
            if link.worker.engine._routes:
                raise SimulationError(f"{link.name} still has routes")

    # ---- faults ------------------------------------------------------------------------------------

    def strike(self, what: str) -> None:
        """Let something go wrong now."""
        self.note(f"*** {what}")
        role, _, kind = what.partition(" ")
        link = self.rng.choice(self.targets if role == "target" else self.drafts)
        match kind:
            case "cut":
                link.cut()
            case "restart":
                link.restart(self.rng.uniform(0.0, 0.15))
            case "drain":
                link.drain(self.rng.uniform(0.0, 0.05), self.rng.uniform(0.0, 0.15))
            case "hang":
                longest = 2.5 * (DEADLINES.target if role == "target" else DEADLINES.draft)
                link.worker.hung_until = self.clock() + self.rng.uniform(0, longest)
            case "evict":
                held = sorted(one.session.sequence_id for one in link.worker.core.sequences)
                if held:
                    link.worker.core.drop(self.rng.choice(held))
            case "crash":
                self._crash_once(link.worker.runner)
            case "gone":
                link.gone_for_good = True
                link.worker.start()
                link.cut()
            case _:
                raise ValueError(what)

    def _crash_once(self, runner: ToyRunner) -> None:
        """The next two passes fail: the batch, and one sequence of it alone."""
        left = [2]

        def crash(token_ids: list[int]) -> Exception | None:
            left[0] -= 1
            return RuntimeError("a planted crash") if left[0] >= 0 else None

        runner.crash_on = crash
