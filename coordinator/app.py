"""The interface between the APIs and the coordinator: validated calls in, committed parts out."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import replace

from coordinator.auth import Gate, Group, principal
from coordinator.requests.generation import Generation, workers_salt
from coordinator.requests.machine_factory import Machines
from coordinator.requests.merge import beside, together
from coordinator.requests.observer import Observer, RequestRecord
from coordinator.requests.registry import Reader, Request, Requests
from coordinator.round.machine import RoundMachine
from coordinator.scheduling.dispatcher import Dispatcher
from coordinator.scheduling.running_sequence import Parts, Running
from coordinator.sequence.ledger import Commit, Ledger
from coordinator.sequence.replay_buffer import ReplayBuffer, ending
from coordinator.setup_warnings import setup_warnings
from coordinator.telemetry.metrics import Metrics
from coordinator.telemetry.request_log import Reporting
from coordinator.telemetry.tenants import TenantMetrics
from coordinator.telemetry.throughput import tell_throughput
from coordinator.text.long_texts import LongTexts
from coordinator.text.structures import Structures
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers.directory.interface import Member
from coordinator.workers.directory.joined import JoinedDirectory
from coordinator.workers.directory.registry import open_directories
from coordinator.workers.fleet import Fleet, FleetObserver
from coordinator.workers.links import Link, LinkObserver
from coordinator.workers.stream_protocol import PROTOCOLS
from paceline.core import limits
from paceline.core.clock import Clock, monotonic
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    InvalidArgumentError,
    NotFoundError,
    PacelineError,
    UnavailableError,
)
from paceline.core.security.secret import WorkerSecret
from paceline.core.types import SequenceParams
from paceline.rpc.codec import GenerateCall, check_against_model, check_choices_remain, check_token_ids
from paceline.rpc.codec.info import check_compatible, check_role, check_single, check_target
from paceline.rpc.security.certificate_expiry import CertificateExpiry
from paceline.v1 import common_pb2

log = logging.getLogger(__name__)


class Coordinator:
    """Wires the fleet, the dispatcher and the requests together."""

    def __init__(
        self,
        config: CoordinatorConfig,
        vocabulary: Vocabulary,
        clock: Clock = monotonic,
        gate: Gate | None = None,
        observers: Sequence[Observer] = (),
        secret: WorkerSecret | None = None,
    ) -> None:
        """`secret` authenticates to workers. Without it, tenants' cached prefixes are lost at a restart."""
        self.config = config
        self.gate = gate or Gate()
        self.vocabulary = vocabulary
        self._texts = LongTexts(vocabulary)
        self.metrics = Metrics()
        self.tenants = TenantMetrics() if config.tenant_metrics else None
        """Usage by tenant; None unless configured."""
        observers = [self.metrics, *([] if self.tenants is None else [self.tenants]), *observers]
        self._reporting = Reporting(observers, clock)
        self.certificates = CertificateExpiry({"tls": config.tls, "worker_tls": config.worker_tls})
        self.dispatcher = Dispatcher(
            config.max_running,
            config.max_waiting,
            clock,
            observers,
            unread_timeout=config.unread_timeout,
        )
        self.requests = Requests(self.dispatcher, config.resume_seconds, clock, config.unread_timeout)
        self._clock = clock
        self._salt_key = secrets.token_bytes(32) if secret is None else secret.derived("cache salts")
        self._machines = Machines(config, vocabulary)
        self._structures = Structures(vocabulary)
        self._target_found = asyncio.Event()
        self._warned: set[str] = set()
        self.readiness_changed = asyncio.Event()
        """Set each time `serving` may have changed."""
        self.draining = False
        """True once the coordinator is stopping: it then refuses new requests."""
        self.coordinators: Sequence[str] = ()
        """host:port of all coordinators of this service, for clients; empty where they are not known."""
        self.joined = None if config.join_port is None else JoinedDirectory()
        """The workers that join by themselves; None unless configured."""
        self.fleet = self._make_fleet(secret)
        self._last_target: common_pb2.WorkerInfo | None = None
        """The target that became ready last, even if it has left since."""

    def _make_fleet(self, secret: WorkerSecret | None) -> Fleet:
        config, dispatcher = self.config, self.dispatcher

        def link(member: Member) -> Link:
            protocol, sockets = PROTOCOLS[member.role], config.local_sockets
            observer = LinkObserver(
                self._admit,
                self._ready,
                self._lost,
                dispatcher.link_events,
                self.fleet.report,
                lambda _link: self.fleet.reconsider(),
            )
            return Link(
                member.address, protocol, observer, config.worker_tls, local_sockets=sockets, secret=secret
            )

        observer = FleetObserver(self._entered, self._leaving, dispatcher.link_left)
        directories = open_directories(config.targets, config.drafts)
        if self.joined is not None:
            directories.append(self.joined)
        return Fleet(directories, link, observer)

    @property
    def links(self) -> Sequence[Link]:
        """All links: targets, then drafts, then workers that get no new sequences."""
        return self.dispatcher.workers.links

    async def run(self) -> None:
        """Run the fleet, deadlines and periodic work until cancelled."""
        with contextlib.closing(self._structures):
            async with asyncio.TaskGroup() as group:
                group.create_task(self.fleet.run())
                group.create_task(self.dispatcher.sweep())
                group.create_task(self.requests.sweep())
                group.create_task(self.certificates.watch())
                group.create_task(tell_throughput(self, self.config.log_stats_seconds))

    async def wait_until_ready(self, draft_seconds: float) -> None:
        """Wait until a target serves, then up to `draft_seconds` until every draft is ready or refused."""
        await self._target_found.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draft_seconds):
                for draft in self.dispatcher.workers.drafts:
                    await draft.settled.wait()

    @property
    def serving(self) -> bool:
        """True while a target worker is ready."""
        return any(link.ready for link in self.dispatcher.workers.targets)

    def target_info(self) -> common_pb2.WorkerInfo:
        """Description of the target whose limits apply to requests; ready targets come first.

        Of several, it is the one with the smallest maximum length, because any of them may get the request.
        Raises UnavailableError if no target was ever admitted.
        """
        served = [
            (not link.ready, link.admitted) for link in self.dispatcher.workers.targets if link.admitted
        ]
        if not served and self._last_target is not None:
            return self._last_target
        if not served:
            raise UnavailableError("no target worker is available yet")
        return min(served, key=lambda each: (each[0], each[1].max_model_len))[1]

    @property
    def warnings(self) -> list[str]:
        """Warnings about a setup that drafts less than it could; empty until a target is known."""
        if not self.has_target:
            return []
        drafts = [link.admitted for link in self.dispatcher.workers.drafts if link.admitted]
        awaited = len(self.dispatcher.workers.drafts) - len(drafts)
        return setup_warnings(self.config, self.target_info(), drafts, awaited)

    @property
    def model_name(self) -> str:
        """The name that clients use for the model."""
        return self.config.model_name or self.target_info().model

    @property
    def known_name(self) -> str:
        """`model_name`; empty if none is configured and no target is known."""
        try:
            return self.model_name
        except UnavailableError:
            return ""

    @property
    def has_target(self) -> bool:
        """True once a target was admitted, so that `target_info` is known."""
        return self._last_target is not None or any(link.admitted for link in self.dispatcher.workers.targets)

    @property
    def accepting(self) -> bool:
        """True while new requests are accepted and served."""
        return self.serving and not self.draining

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text. Raises InvalidArgumentError naming `text`."""
        length = self._known_length
        return await self._texts.encode("text", text, length, add_special_tokens=add_special_tokens)

    def check_length(self, name: str, characters: int) -> None:
        """Raises InvalidArgumentError naming `name` if a prompt may not have this many characters."""
        self._texts.check_length(name, characters, self._known_length)

    @property
    def max_request_bytes(self) -> int:
        """Upper bound for the bytes of one request, from the model's length.

        A request holds a prompt, the received tokens of all choices, and other lists.
        """
        length = self._known_length
        tokens = length + min(limits.MAX_RECEIVED_TOKENS, limits.MAX_N * length)
        return self._texts.max_bytes(length) + limits.MAX_OTHER_LIST_BYTES + tokens * limits.MAX_TOKEN_BYTES

    @property
    def _known_length(self) -> int:
        """The model's maximum length; the greatest allowed one until a target is known."""
        return self.target_info().max_model_len if self.has_target else limits.MAX_PROMPT_TOKENS

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """Decode ids without special tokens. Raises InvalidArgumentError naming `token_ids`."""
        if len(token_ids) > limits.MAX_PROMPT_TOKENS:
            raise InvalidArgumentError("token_ids", f"at most {limits.MAX_PROMPT_TOKENS}")
        check_token_ids("token_ids", token_ids, self.vocabulary.size)
        return await self._texts.decode(token_ids)

    @contextlib.asynccontextmanager
    async def generating(
        self, call: GenerateCall, deadline: float = math.inf, group: Group | None = None
    ) -> AsyncIterator[Generation]:
        """Begin or resume a request, and end it at the end of the `async with` block.

        A resumable request whose block is cancelled is held for a while, at most until the client's
        `deadline` (of the clock). `group` counts the requests of one HTTP call together. Raises
        PacelineError; InvalidArgumentError names the field.
        """
        with self._reporting.observed(call, self.known_name) as report, contextlib.ExitStack() as counted:
            if call.resumption is None:
                # The request is counted first, since waiting and tokenising take resources too.
                counted.enter_context((group or self.gate).holding(self.gate.charge(), call.sampling.n))
            self._refuse_when_draining()
            await self.wait_for_target()
            info, report.model = self.target_info(), self.model_name
            request = self._resumed(call)
            if request is None:
                if call.resumption is not None:
                    counted.enter_context((group or self.gate).holding(self.gate.charge(), call.sampling.n))
                prepared = await self._prepared(call, report, info)
                if call.resumption is not None:
                    # Meanwhile the same client may have resumed it over another connection.
                    request = self._resumed(call)
                if request is None:
                    request = self._begin(*prepared)
                    self._count(request, counted)
                counted.close()  # a held request has been counted already
            report.request_id = request.call.request_id
            with self.requests.reading(request, deadline) as reader:
                generation = self._generation(reader, call)
                self._reporting.taken_on(report, generation)
                yield generation

    def _resumed(self, call: GenerateCall) -> Request | None:
        """The held request that the call resumes, if any. Resuming it is not charged to the key."""
        try:
            return self.requests.resume(principal.get().name, call)
        except AlreadyExistsError:
            self.gate.charge()
            raise

    async def _prepared(
        self, call: GenerateCall, report: RequestRecord, info: common_pb2.WorkerInfo
    ) -> tuple[GenerateCall, Sequence[int], str, Sequence[RoundMachine]]:
        """Build a request that is not held here: a new one, or one resumed from the client's tokens."""
        self.dispatcher.check_fits(call.sampling.n)
        text = isinstance(call.prompt, str)
        prompt: Sequence[int]
        if isinstance(call.prompt, str):
            prompt = await self._texts.encode("prompt", call.prompt, info.max_model_len)
        else:
            prompt = call.prompt
        if not prompt:
            raise InvalidArgumentError("prompt", "has no tokens" if text else "must not be empty")
        check_against_model(call, len(prompt), info.vocabulary_size, info.max_model_len)
        structure, received = call.sampling.structure, self._received(call)
        if structure is not None:
            await self._structures.check(structure, info.eos_token_ids)
            if any(received):
                await self._structures.check_received(structure, info.eos_token_ids, received)
        params = replace(self._params(call, len(prompt)), traceparent=report.traceparent)
        check_choices_remain(params, info.vocabulary_size, info.eos_token_ids)
        own = [self._machines.of_choice(params, choice, has) for choice, has in enumerate(received)]
        ledgers = [self._machines.ledger(prompt, mine, choice, info) for choice, mine in enumerate(own)]
        if any(received):
            # A million tokens take seconds, and would block the event loop for all other requests.
            await asyncio.to_thread(_replay, ledgers, received)
        self._refuse_when_draining()
        machines = [self._machines.make(call, *each, info) for each in zip(own, ledgers, strict=True)]
        named = replace(
            call,
            request_id=call.request_id or f"gen-{secrets.token_hex(12)}",
            sampling=params.sampling,
            resumption=None,
        )
        return named, prompt, await self._echoed(call, prompt), machines

    def _count(self, request: Request, counted: contextlib.ExitStack) -> None:
        """Move the counters to the request, and schedule its end at the maximum age."""
        seconds, choices = self.config.max_request_seconds, request.choices
        aging = asyncio.get_running_loop().call_later(seconds, self._expire, choices)
        counted.callback(aging.cancel)
        request.counted = counted.pop_all()

    def _generation(self, reader: Reader, call: GenerateCall) -> Generation:
        """There must be no await between the start of reading and this call, or queues miss commits."""
        request = reader.request
        return Generation(
            request.call.request_id,
            request.prompt,
            request.choices,
            reader,
            [self._before(request, choice, call) for choice in range(len(request.choices))],
            [running.parts for running in request.choices],
        )

    def _begin(
        self, call: GenerateCall, prompt: Sequence[int], echoed: str, machines: Sequence[RoundMachine]
    ) -> Request:
        """Register the request and submit its sequences, without an await in between."""
        request = Request(principal.get().name, call, prompt, echoed)
        self.requests.add(request)
        try:
            for machine in machines:
                replay = ReplayBuffer(machine.state.ledger.num_generated) if call.resumable else None
                running = self.dispatcher.submit(machine, replay)
                running.tenant = request.principal
                request.choices.append(running)
        except BaseException as error:
            self.requests.end(request, error if isinstance(error, PacelineError) else None)
            raise
        return request

    def _received(self, call: GenerateCall) -> Sequence[Sequence[int]]:
        """The tokens of each choice that the client already has, for a request that is not held here."""
        resumption = call.resumption
        if resumption is None or resumption.begins:
            return [()] * call.sampling.n
        if not resumption.received:
            raise NotFoundError("this request is not held; it can be resumed with the tokens `received`")
        if call.sampling.seed is None and not call.sampling.greedy:
            raise InvalidArgumentError("seed", "is required to resume a request that is not held")
        return resumption.received

    def _before(self, request: Request, choice: int, call: GenerateCall) -> Iterable[Commit]:
        """Earlier commits of a choice that the client lacks. They are sent before later commits."""
        running = request.choices[choice]
        ledger, replay = running.state.ledger, running.replay
        count = 0 if call.resumption is None else call.resumption.resume_from[choice]
        if count and count == ledger.num_generated:
            return [ending(ledger)] if ledger.ended else []
        echo = [Commit(0, (), (), request.prompt_text, choice=choice)] if request.prompt_text else []
        if call.resumption is None or replay is None:
            return echo
        skips = request.call.sampling.skip_special_tokens
        fresh = ledger.fresh(self.vocabulary.detokenizer(request.prompt, skip_special_tokens=skips))
        return itertools.chain(() if count else echo, replay.missed(count, ledger, fresh))

    def _expire(self, choices: Sequence[Running]) -> None:
        """End a request that has reached the maximum age, even if its client has stopped reading."""
        for running in choices:
            seconds = self.config.max_request_seconds
            self.dispatcher.abort(running, DeadlineExceededError(f"the request is older than {seconds:g} s"))

    def _refuse_when_draining(self) -> None:
        if self.draining:
            raise UnavailableError("the coordinator is stopping")

    def close(self) -> None:
        """End the process that compiles structures, if it runs. Repeated calls are allowed."""
        self._structures.close()

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and wait up to `seconds` for running ones; then end them."""
        self.draining = True
        self._structures.close()
        self.requests.hold_no_more()
        try:
            async with asyncio.timeout(seconds):
                while len(self.requests):
                    await self.requests.ended.wait()
                    self.requests.ended.clear()
        except TimeoutError:
            self.dispatcher.abort_all(UnavailableError("the coordinator is stopping"))

    def _params(self, call: GenerateCall, prompt_length: int) -> SequenceParams:
        """Parameters of the request; those of each choice are derived from them."""
        sampling = call.sampling
        if sampling.seed is None:
            sampling = sampling.with_seed(secrets.randbits(64))
        mode = call.speculation.mode or self.config.acceptance
        bad_words = self.vocabulary.bad_words(sampling.bad_words)
        salt = workers_salt(call, principal.get().name, self._salt_key)
        return SequenceParams(sampling, mode, prompt_length, bad_words, salt)

    async def _echoed(self, call: GenerateCall, prompt: Sequence[int]) -> str:
        if not call.sampling.echo:
            return ""
        if isinstance(call.prompt, str):
            return call.prompt
        return await self._texts.decode(prompt, skip_special_tokens=call.sampling.skip_special_tokens)

    async def parts(self, generation: Generation) -> AsyncIterator[Commit]:
        """Yield the commits of a request; those of one choice come in order. Raises PacelineError."""
        reader = generation.reader
        if reader is not None:
            reader.request.begun = True
        streams = [
            self._parts_of(running, before, queue)
            for running, before, queue in zip(
                generation.choices, generation.before, generation.queues, strict=True
            )
        ]
        async for part in streams[0] if len(streams) == 1 else together(streams):
            yield part
            self.took([generation])

    def took(self, generations: Iterable[Generation]) -> None:
        """Record that the client of these generations has read something."""
        for generation in generations:
            if generation.reader is not None:
                generation.reader.took(self._clock())

    async def _parts_of(
        self, running: Running, before: Iterable[Commit], queue: Parts
    ) -> AsyncIterator[Commit]:
        async for commit in beside(before):
            yield commit
            if commit.finish is not None:
                return
        while True:
            part = await self.dispatcher.next_part(running, queue)
            if isinstance(part, PacelineError):
                raise part
            yield part
            if part.finish is not None:
                return

    async def wait_for_target(self) -> None:
        """Wait up to the recovery timeout for the first target. Raises UnavailableError."""
        try:
            # `wait_for` would lose a cancellation in the event-loop turn in which the target is found.
            async with asyncio.timeout(self.config.recovery_timeout):
                await self._target_found.wait()
        except TimeoutError:
            raise UnavailableError("no target worker is available") from None

    def _admit(self, link: Link, info: common_pb2.WorkerInfo) -> None:
        """Check a worker. Raises PacelineError, naming both values, if it cannot serve here."""
        check_role(info, link.role, link.address)
        # A link to an address that is not listed any more gets no sequences, and does not matter.
        used = [each for each in self.links if each.draining or each not in self.dispatcher.workers.leaving]
        check_single(info, {each.instance_id: each.address for each in used if each is not link})
        if link.role == "target":
            others = [
                other.admitted
                for other in self.dispatcher.workers.targets
                if other is not link and other.ready and other.admitted is not None
            ]
            check_target(info, others, self.config.tokenizer, self.vocabulary.fingerprint)
        else:
            check_compatible(self.target_info(), info)

    def _ready(self, link: Link) -> None:
        self.fleet.reconsider()  # its predecessor at this address may have left
        if link.role == "target":
            self._last_target = link.admitted
            self._target_found.set()
        for warning in self.warnings:
            if warning not in self._warned:
                log.warning("%s", warning)
                self._warned.add(warning)
        self.dispatcher.link_ready(link)
        self.readiness_changed.set()

    def _lost(self, link: Link) -> None:
        self.dispatcher.link_lost(link)
        self.readiness_changed.set()

    def _entered(self, link: Link) -> None:
        self.dispatcher.link_entered(link)
        self.readiness_changed.set()

    def _leaving(self, link: Link) -> None:
        self.dispatcher.link_leaving(link)
        self.readiness_changed.set()


def _replay(ledgers: Sequence[Ledger], received: Sequence[Sequence[int]]) -> None:
    """Replay the client's tokens into each choice's ledger. Raises InvalidArgumentError."""
    for ledger, token_ids in zip(ledgers, received, strict=True):
        try:
            ledger.replay(token_ids)
        except ValueError:
            raise InvalidArgumentError("received", "continues after the end of the output") from None
