"""The gRPC API: GenerationService over the coordinator."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import grpc
from google.protobuf.message import Message

from coordinator.api.conversations import Conversations
from coordinator.app import Coordinator
from coordinator.auth import principal
from coordinator.requests.generation import Generation
from coordinator.requests.registry import Reader
from coordinator.scheduling.running_sequence import UNREAD
from coordinator.sequence.ledger import Commit
from coordinator.sequence.round_record import PROMPT_LOOKUP
from coordinator.telemetry import call_log
from coordinator.text.vocabulary import Vocabulary
from coordinator.workers.links import Link, LinkState
from paceline.core.clock import monotonic
from paceline.core.errors import PacelineError, UnavailableError
from paceline.core.types import TokenLogprobs
from paceline.core.validation import AUTO
from paceline.rpc import codec
from paceline.rpc.codec.chat import chat_from_proto
from paceline.rpc.codec.status import abort
from paceline.rpc.server.server import Server
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc

if TYPE_CHECKING:
    from coordinator.api.http.server.server import HttpServer

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]
ResponseT = TypeVar("ResponseT")
RequestT = TypeVar("RequestT", bound=Message)

_STATES = {
    LinkState.CONNECTING: pb.WORKER_STATE_CONNECTING,
    LinkState.READY: pb.WORKER_STATE_READY,
    LinkState.LOST: pb.WORKER_STATE_LOST,
    LinkState.REFUSED: pb.WORKER_STATE_REFUSED,
    LinkState.DRAINING: pb.WORKER_STATE_DRAINING,
}


class GenerationService(generation_pb2_grpc.GenerationServiceServicer):
    """The gRPC service for clients."""

    def __init__(
        self,
        coordinator: Coordinator,
        server: Server,
        conversations: Conversations | None = None,
        http: HttpServer | None = None,
    ) -> None:
        self._coordinator = coordinator
        self._server = server
        self._conversations = conversations or Conversations(coordinator, None)
        self._http = http
        self._cutting: set[asyncio.Task[None]] = set()
        """Calls that end once their clients have read everything sent before."""

    async def Generate(  # noqa: N802
        self, request: pb.GenerateRequest, context: Context
    ) -> AsyncIterator[pb.GenerateResponse]:
        """Stream the tokens of a request, one message a round."""
        reader: Reader | None = None
        try:
            self._charge(request)
            call = codec.generate_request_from_proto(request)
            deadline = _deadline(context)
            async with self._coordinator.generating(call, deadline) as generation:
                reader = generation.reader
                await _send_headers(context)
                yield _started(generation)
                async for commit in self._coordinator.parts(generation):
                    if commit.token_ids or commit.text or commit.prompt_logprobs:
                        yield _chunk(commit, self._coordinator.vocabulary)
                    if commit.finish is not None:
                        yield _finished(generation, commit)
        except (GeneratorExit, asyncio.CancelledError):
            # Only a client that is still connected and does not read gets the error, which gRPC would not
            # send. Nothing can be sent to a client that is gone, and gRPC may keep memory for each attempt.
            if reader is not None and reader.was_cut:
                cutting = asyncio.create_task(_cut(context, reader))
                self._cutting.add(cutting)
                cutting.add_done_callback(self._cutting.discard)
            raise
        except PacelineError as error:
            call_log.refused(error)
            await abort(context, error)
        except Exception as error:
            log.exception("a request failed")
            await abort(context, error)

    def _charge(self, request: pb.GenerateRequest) -> None:
        """Charge a call before it is validated, unless it resumes a request.

        A resumption that has to start afresh is charged later. Raises ResourceExhaustedError.
        """
        here = self._coordinator.requests.may_be_resumed(principal.get().name, request.request_id)
        if not (request.resume_from and here):
            self._coordinator.gate.charge()

    async def Cancel(self, request: pb.CancelRequest, context: Context) -> pb.CancelResponse:  # noqa: N802
        """End a request that its client will not resume."""
        return await _or_abort(context, self._cancel, request)

    async def _cancel(self, request: pb.CancelRequest) -> pb.CancelResponse:
        name = codec.cancel_request_from_proto(request)
        self._coordinator.requests.cancel(principal.get().name, name)
        return pb.CancelResponse()

    async def ListModels(self, request: pb.ListModelsRequest, context: Context) -> pb.ListModelsResponse:  # noqa: N802
        """The one model this coordinator serves."""
        return await _or_abort(context, self._list_models, request)

    async def _list_models(self, _: pb.ListModelsRequest) -> pb.ListModelsResponse:
        info = self._coordinator.target_info()
        model = pb.Model(
            id=self._coordinator.model_name,
            max_model_len=info.max_model_len,
            vocabulary_size=info.vocabulary_size,
        )
        return pb.ListModelsResponse(models=[model])

    async def Tokenize(self, request: pb.TokenizeRequest, context: Context) -> pb.TokenizeResponse:  # noqa: N802
        """Text to ids."""
        return await _or_abort(context, self._tokenize, request)

    async def _tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        ids = await self._coordinator.tokenize(request.text)
        return pb.TokenizeResponse(token_ids=ids, max_model_len=self._coordinator.target_info().max_model_len)

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Context) -> pb.DetokenizeResponse:  # noqa: N802
        """Ids to text."""
        return await _or_abort(context, self._detokenize, request)

    async def _detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        return pb.DetokenizeResponse(text=await self._coordinator.detokenize(request.token_ids))

    async def ApplyChatTemplate(  # noqa: N802
        self, request: pb.ApplyChatTemplateRequest, context: Context
    ) -> pb.ApplyChatTemplateResponse:
        """A conversation as a prompt."""
        return await _or_abort(context, self._apply_chat_template, request)

    async def _apply_chat_template(
        self, request: pb.ApplyChatTemplateRequest
    ) -> pb.ApplyChatTemplateResponse:
        call = chat_from_proto(request)
        ids = await self._conversations.encode(
            call.messages,
            add_generation_prompt=call.add_generation_prompt,
            continue_final_message=call.continue_final_message,
            variables=call.variables,
        )
        length = self._coordinator.target_info().max_model_len
        return pb.ApplyChatTemplateResponse(token_ids=ids, max_model_len=length)

    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.GetStatusResponse:  # noqa: N802
        """The coordinator and its workers, as they are now."""
        return await _or_abort(context, self._status, request)

    async def _status(self, _: pb.GetStatusRequest) -> pb.GetStatusResponse:
        coordinator, dispatcher = self._coordinator, self._coordinator.dispatcher
        config = coordinator.config
        k, width = config.num_speculative_tokens, config.tree_width
        status = pb.CoordinatorStatus(
            address=self._server.address,
            process_id=os.getpid(),
            running=dispatcher.running,
            waiting=dispatcher.waiting,
            num_speculative_tokens=0 if k == AUTO else k,
            auto_num_speculative_tokens=k == AUTO,
            max_num_speculative_tokens=config.max_num_speculative_tokens,
            tree_width=0 if width == AUTO else width,
            auto_tree_width=width == AUTO,
            max_tree_nodes=config.max_tree_nodes,
            drafts_per_sequence=config.drafts_per_sequence,
            acceptance_mode=codec.mode_to_proto(config.acceptance),
            prompt_lookup=PROMPT_LOOKUP in config.source_names,
            sources=config.source_names,
            finished_requests=dispatcher.finished,
            failed_requests=dispatcher.failed,
            num_preemptions=dispatcher.num_preemptions,
            http_address=self._http.address if self._http is not None else "",
            warnings=coordinator.warnings,
            coordinators=coordinator.coordinators,
            serving=coordinator.accepting,
        )
        workers = await asyncio.gather(*(_worker(link) for link in coordinator.links))
        return pb.GetStatusResponse(coordinator=status, workers=workers)


def _deadline(context: Context) -> float:
    """The client's deadline, on the coordinator's clock."""
    remaining = context.time_remaining()
    return math.inf if remaining is None else monotonic() + remaining


async def _send_headers(context: Context) -> None:
    """Send the headers before the first message: a call that is cut while both are sent gets no status.

    Raises CancelledError if the client is gone, as later sends do.
    """
    try:
        await context.send_initial_metadata(())
    except Exception as error:
        raise asyncio.CancelledError from error


async def _or_abort(
    context: Context, answer: Callable[[RequestT], Awaitable[ResponseT]], request: RequestT
) -> ResponseT:
    """Return the answer, or abort the call with the status of its error."""
    try:
        codec.refuse_unknown_fields(request, "request")
        return await answer(request)
    except PacelineError as error:
        call_log.refused(error)
        await abort(context, error)
    except Exception as error:
        log.exception("a call failed")
        await abort(context, error)
    raise AssertionError("abort does not return")


async def _cut(context: Context, reader: Reader) -> None:
    """End a cut call. Clients retry after UNAVAILABLE; a request that ended for good gets its own error."""
    with contextlib.suppress(Exception):  # its client may disconnect meanwhile
        await abort(context, reader.cut_with or UnavailableError(UNREAD))


async def _worker(link: Link) -> pb.WorkerStatus:
    info = await link.refresh()
    status = pb.WorkerStatus(
        address=link.address, role=link.role, state=_STATES[link.state], reason=link.reason
    )
    if info is not None:
        status.info.CopyFrom(info)
    return status


def _started(generation: Generation) -> pb.GenerateResponse:
    started = pb.GenerateStarted(
        request_id=generation.request_id,
        seed=generation.params.sampling.seed or 0,
        num_prompt_tokens=generation.params.prompt_length,
        acceptance_mode=codec.mode_to_proto(generation.params.mode),
        seeds=[machine.state.params.sampling.seed or 0 for machine in generation.machines],
    )
    sampling = generation.params.sampling
    if sampling.echo or sampling.prompt_logprobs is not None:
        started.prompt_token_ids.extend(generation.prompt)
    return pb.GenerateResponse(started=started)


def _chunk(commit: Commit, vocabulary: Vocabulary) -> pb.GenerateResponse:
    chunk = pb.GenerateChunk(
        index=commit.index,
        token_ids=commit.token_ids,
        text=commit.text,
        origins=[codec.origin_to_proto(origin) for origin in commit.origins],
        choice=commit.choice,
        logprobs=[_position(entry, vocabulary) for entry in commit.logprobs],
        prompt_logprobs=[_position(entry, vocabulary) for entry in commit.prompt_logprobs],
    )
    return pb.GenerateResponse(chunk=chunk)


def _position(entry: TokenLogprobs, vocabulary: Vocabulary) -> pb.PositionLogprobs:
    ranked = zip(entry.top_token_ids, entry.top_logprobs, itertools.count(1))
    tokens = [(entry.token_id, entry.logprob, entry.rank), *ranked]
    return pb.PositionLogprobs(
        tokens=[
            pb.Logprob(
                token_id=token_id, logprob=logprob, rank=rank, decoded_token=vocabulary.token_text(token_id)
            )
            for token_id, logprob, rank in tokens
        ]
    )


def _finished(generation: Generation, commit: Commit) -> pb.GenerateResponse:
    machine, finish = generation.machines[commit.choice], commit.finish
    assert finish is not None
    stats, times = machine.state.stats, machine.state.times
    generated, prompt = machine.state.ledger.num_generated, machine.state.ledger.prompt_length
    finished = pb.GenerateFinished(
        choice=commit.choice,
        finish_reason=codec.finish_reason_to_proto(finish.reason),
        usage=pb.Usage(
            prompt_tokens=prompt,
            completion_tokens=generated,
            total_tokens=prompt + generated,
            cached_prompt_tokens=stats.cached_prompt_tokens,
        ),
        speculative_decoding=pb.SpeculativeDecoding(
            mean_acceptance_length=stats.mean_acceptance_length,
            draft_acceptance_rate=stats.acceptance_rate,
            acceptance_histogram=stats.histogram,
            num_spec_steps=stats.num_spec_steps,
            num_draft_tokens=stats.num_draft_tokens,
            num_accepted_draft_tokens=stats.num_accepted_draft_tokens,
            acceptance_rate_per_position=stats.acceptance_rate_per_position,
            num_rounds=stats.num_rounds,
            num_lookahead_hits=stats.num_lookahead_hits,
            num_prompt_lookups=stats.num_prompt_lookups,
            accepted_per_rank=stats.accepted_per_rank,
            by_source=[
                pb.SourceCounts(source=source, **asdict(counts)) for source, counts in stats.proposing.items()
            ],
        ),
        timings=pb.RoundTimings(
            draft_us=round(times.draft * 1e6),
            target_us=round(times.target * 1e6),
            queue_us=round(times.queue * 1e6),
            wire_us=round(times.wire * 1e6),
            coordinator_us=round(times.coordinator * 1e6),
            total_us=round(times.total * 1e6),
        ),
    )
    if finish.stop_string is not None:
        finished.stop_string = finish.stop_string
    elif finish.stop_token_id is not None:
        finished.stop_token_id = finish.stop_token_id
    return pb.GenerateResponse(finished=finished)
