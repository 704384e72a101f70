"""The coordinator as its faces see it: validated calls in, committed parts out."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace

from coordinator.access import Gate, principal
from coordinator.dispatcher import Dispatcher, Running
from coordinator.events import Deadlines
from coordinator.ledger import Commit, Ledger
from coordinator.links import DraftDialect, Link, LinkObserver, LinkState, TargetDialect
from coordinator.observer import Observer, RequestRecord
from coordinator.pair import Pair
from coordinator.policy import Fixed, Goodput, Policy
from coordinator.recorder import Recorder
from coordinator.requests import Requests
from coordinator.round import RoundMachine
from coordinator.structures import Structures
from coordinator.together import together
from coordinator.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.checks import AUTO
from paceline.core.clock import Clock, monotonic
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    PacelineError,
    TokenizerMismatchError,
    UnavailableError,
)
from paceline.core.types import SequenceParams
from paceline.rpc.codec import (
    PROTOCOL_VERSION,
    GenerateCall,
    check_against_model,
    check_choices_remain,
    check_token_ids,
)
from paceline.rpc.info import check_compatible
from paceline.v1 import common_pb2


@dataclass(frozen=True, slots=True)
class Generation:
    """One request that was accepted, and how it will be run: a sequence for each of its choices."""

    request_id: str
    prompt: Sequence[int]
    prompt_text: str
    """What `echo` puts in front of the text; empty without it."""
    choices: Sequence[Running]

    @property
    def machines(self) -> list[RoundMachine]:
        """Each choice's round machine: parameters, ledger, counts and times."""
        return [running.machine for running in self.choices]

    @property
    def params(self) -> SequenceParams:
        """Those of the first choice; the others differ in their seeds."""
        return self.choices[0].machine.params


def workers_salt(call: GenerateCall, tenant: str) -> str:
    """Who shares cached prefixes with whom: the workers' salt of a request.

    Tenants never do, whatever they say. The length before the name keeps "a" with "b:" from being "a:b".
    """
    return f"{len(tenant)}:{tenant}:{call.cache_salt}" if tenant else call.cache_salt


class Coordinator:
    """Owns the links and the dispatcher."""

    def __init__(
        self,
        config: CoordinatorConfig,
        vocabulary: Vocabulary,
        clock: Clock = monotonic,
        gate: Gate | None = None,
        observers: Sequence[Observer] = (),
    ) -> None:
        self.config = config
        self.gate = gate or Gate()
        self.vocabulary = vocabulary
        self.recorder = Recorder()
        self._requests = Requests((self.recorder, *observers), clock)
        self.dispatcher = Dispatcher(
            config.max_running, config.max_waiting, clock, (self.recorder, *observers)
        )
        self._clock = clock
        self._pair = Pair(config.max_num_speculative_tokens)
        self._structures = Structures(vocabulary)
        self._target_found = asyncio.Event()
        self.readiness_changed = asyncio.Event()
        """Set whenever `serving` may have changed."""
        self._request_ids: set[str] = set()
        self._draining = False
        self._request_ended = asyncio.Event()
        observer = LinkObserver(self._admit, self._ready, self._lost, self.dispatcher.link_events)
        tls = config.worker_tls
        self.dispatcher.targets = [Link(a, TargetDialect(), observer, tls) for a in config.targets]
        self.dispatcher.drafts = [Link(a, DraftDialect(), observer, tls) for a in config.drafts]

    @property
    def links(self) -> Sequence[Link]:
        """Targets first."""
        return [*self.dispatcher.targets, *self.dispatcher.drafts]

    async def run(self) -> None:
        """Keep links and deadlines going until cancelled."""
        async with asyncio.TaskGroup() as group:
            for link in self.links:
                group.create_task(link.run())
            group.create_task(self.dispatcher.sweep())

    async def wait_until_ready(self, draft_seconds: float) -> None:
        """Until a target serves and every draft is ready or refused (those only up to a time)."""
        await self._target_found.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(draft_seconds):
                for draft in self.dispatcher.drafts:
                    await draft.settled.wait()

    @property
    def serving(self) -> bool:
        """True while a target worker is there."""
        return any(link.ready for link in self.dispatcher.targets)

    def target_info(self) -> common_pb2.WorkerInfo:
        """What the target is. Raises UnavailableError before one was ever there."""
        for link in self.dispatcher.targets:
            if link.known is not None and link.state is not LinkState.REFUSED:
                return link.known
        raise UnavailableError("no target worker is there yet")

    @property
    def model_name(self) -> str:
        """What clients call the model."""
        return self.config.model_name or self.target_info().model

    @property
    def accepting(self) -> bool:
        """True while a new request would be served."""
        return self.serving and not self._draining

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Text to ids. Raises InvalidArgumentError naming `text`."""
        if len(text) > limits.MAX_PROMPT_CHARACTERS:
            raise InvalidArgumentError("text", f"at most {limits.MAX_PROMPT_CHARACTERS} characters")
        return await self.vocabulary.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """Ids to text, special tokens left out. Raises InvalidArgumentError naming `token_ids`."""
        if len(token_ids) > limits.MAX_PROMPT_TOKENS:
            raise InvalidArgumentError("token_ids", f"at most {limits.MAX_PROMPT_TOKENS}")
        check_token_ids("token_ids", token_ids, self.vocabulary.size)
        return self.vocabulary.decode(token_ids)

    @contextlib.asynccontextmanager
    async def generating(self, call: GenerateCall) -> AsyncIterator[Generation]:
        """Take a request on; however the block is left, the request has ended by then.

        Raises PacelineError; InvalidArgumentError names the field.
        """
        # Sequences are counted before anything is done for them: tokenising and waiting are work as well.
        with (
            self._requests.observed(call, self._known_name()) as request,
            self.gate.holding(principal.get(), call.sampling.n),
        ):
            async with self._taken_on(call, request) as generation:
                self._requests.taken_on(request, generation)
                yield generation

    def _known_name(self) -> str:
        return self.model_name if self.serving else self.config.model_name

    @contextlib.asynccontextmanager
    async def _taken_on(self, call: GenerateCall, request: RequestRecord) -> AsyncIterator[Generation]:
        self._refuse_when_draining()
        await self._wait_for_target()
        info, request.model = self.target_info(), self.model_name
        text = isinstance(call.prompt, str)
        prompt = await self.vocabulary.encode(call.prompt) if isinstance(call.prompt, str) else call.prompt
        if not prompt:
            raise InvalidArgumentError("prompt", "has no tokens" if text else "must not be empty")
        check_against_model(call, len(prompt), info.vocabulary_size, info.max_model_len)
        if call.sampling.structure is not None:
            await self._structures.check(call.sampling.structure, info.eos_token_ids)
        self._refuse_when_draining()
        request_id = request.request_id = call.request_id or f"gen-{secrets.token_hex(12)}"
        if request_id in self._request_ids:
            raise InvalidArgumentError("request_id", "is running already")
        params = replace(self._params(call, len(prompt)), traceparent=request.traceparent)
        check_choices_remain(params, info.vocabulary_size, info.eos_token_ids)
        choices: list[Running] = []
        self._request_ids.add(request_id)
        aging = asyncio.get_running_loop().call_later(self.config.max_request_seconds, self._expire, choices)
        try:
            for choice in range(params.sampling.n):
                running = self.dispatcher.submit(self._machine(call, params, choice, prompt, info))
                choices.append(running)
            yield Generation(request_id, prompt, self._echoed(call, prompt), choices)
        finally:
            aging.cancel()
            self._request_ids.discard(request_id)
            self._request_ended.set()
            for running in choices:
                self.dispatcher.cancel(running)

    def _expire(self, choices: Sequence[Running]) -> None:
        """Free what a request holds that is too old, also when its client has stopped reading."""
        for running in choices:
            seconds = self.config.max_request_seconds
            self.dispatcher.abort(running, DeadlineExceededError(f"the request is older than {seconds:g} s"))

    def _refuse_when_draining(self) -> None:
        if self._draining:
            raise UnavailableError("the coordinator is stopping")

    async def drain(self, seconds: float) -> None:
        """Refuse new requests, and let those that run end; after `seconds` they are told to."""
        self._draining = True
        try:
            async with asyncio.timeout(seconds):
                while self._request_ids:
                    await self._request_ended.wait()
                    self._request_ended.clear()
        except TimeoutError:
            self.dispatcher.abort_all(UnavailableError("the coordinator is stopping"))

    def _params(self, call: GenerateCall, prompt_length: int) -> SequenceParams:
        """Of the request; each choice's follow from it."""
        sampling = call.sampling
        if sampling.seed is None:
            sampling = replace(sampling, seed=secrets.randbits(64))
        mode = call.speculation.mode or self.config.acceptance
        bad_words = self.vocabulary.bad_words(sampling.bad_words)
        return SequenceParams(
            sampling, mode, prompt_length, bad_words, workers_salt(call, principal.get().name)
        )

    def _echoed(self, call: GenerateCall, prompt: Sequence[int]) -> str:
        if not call.sampling.echo:
            return ""
        return call.prompt if isinstance(call.prompt, str) else self.vocabulary.decode(prompt)

    def _machine(
        self,
        call: GenerateCall,
        request: SequenceParams,
        choice: int,
        prompt: Sequence[int],
        info: common_pb2.WorkerInfo,
    ) -> RoundMachine:
        config = self.config
        params = replace(request, sampling=request.sampling.of_choice(choice))
        wanted = call.speculation.num_speculative_tokens
        k = config.num_speculative_tokens if wanted is None else wanted
        policy: Policy = Goodput(self._pair, self._pair.max_draft) if k == AUTO else Fixed(self._pair, k)
        ledger = Ledger(
            prompt,
            params.sampling,
            detokenizer=self.vocabulary.detokenizer(prompt),
            eos_token_ids=frozenset(info.eos_token_ids),
            max_model_len=info.max_model_len,
            choice=choice,
        )
        return RoundMachine(
            # Unlike the request id it is never used twice, whatever clients choose.
            sequence_id=secrets.token_hex(12),
            ledger=ledger,
            params=params,
            num_speculative_tokens=self._pair.max_draft if k == AUTO else k,
            deadlines=Deadlines(config.draft_timeout, config.target_timeout, config.recovery_timeout),
            vocabulary_size=info.vocabulary_size,
            target_max_len=info.max_model_len,
            deadline=self._clock() + config.recovery_timeout,
            policy=policy,
        )

    async def parts(self, generation: Generation) -> AsyncIterator[Commit]:
        """The commits of a request, those of each choice in order. Raises PacelineError."""
        if generation.prompt_text:
            for choice in range(len(generation.choices)):
                yield Commit(0, (), (), generation.prompt_text, choice=choice)
        streams = [self._parts_of(running) for running in generation.choices]
        async for part in streams[0] if len(streams) == 1 else together(streams):
            yield part

    async def _parts_of(self, running: Running) -> AsyncIterator[Commit]:
        while True:
            part = await self.dispatcher.next_part(running)
            if isinstance(part, PacelineError):
                raise part
            yield part
            if part.finish is not None:
                return

    async def _wait_for_target(self) -> None:
        try:
            await asyncio.wait_for(self._target_found.wait(), self.config.recovery_timeout)
        except TimeoutError:
            raise UnavailableError("no target worker is there") from None

    def _admit(self, link: Link, info: common_pb2.WorkerInfo) -> None:
        """Refuse a worker that cannot serve here, naming both values."""
        if info.role != link.role:
            raise InvalidArgumentError(f"{link.role}s", f"{link.address} is a {info.role} worker")
        if info.protocol_version != PROTOCOL_VERSION:
            raise FailedPreconditionError(
                f"it speaks protocol version {info.protocol_version}, this coordinator {PROTOCOL_VERSION}"
            )
        if link.role == "target":
            if info.tokenizer_fingerprint != self.vocabulary.fingerprint:
                raise TokenizerMismatchError(
                    "tokenizer",
                    f"tokenizer_fingerprint of the target {info.model} is {info.tokenizer_fingerprint}, "
                    f"of {self.config.tokenizer} {self.vocabulary.fingerprint}",
                )
        else:
            check_compatible(self.target_info(), info)

    def _ready(self, link: Link) -> None:
        if link.role == "target":
            self._target_found.set()
        self.dispatcher.link_ready(link)
        self.readiness_changed.set()

    def _lost(self, link: Link) -> None:
        self.dispatcher.link_lost(link)
        self.readiness_changed.set()
