"""A worker's `AdminService`: profiles of its engine thread, and the order to stop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from paceline.core.errors import InternalError, PacelineError, PermissionDeniedError, ResourceExhaustedError
from paceline.core.validation import require
from paceline.engine.profiling import EngineProfile
from paceline.engine.scheduling.engine_thread import EngineThread
from paceline.rpc.codec.drain import drain_call_from_proto
from paceline.rpc.codec.profile import profile_call_from_proto, profile_responses
from paceline.rpc.security.auth import is_local_call
from paceline.rpc.streams.worker_stream import ask
from paceline.v1 import admin_pb2, admin_pb2_grpc

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HandedOver:
    """What became of the sequences of a worker that stops."""

    sequences: int = 0
    """Sequences when it began to stop."""
    left: int = 0
    """Those that no other worker took."""


class WorkerAdminService(admin_pb2_grpc.AdminServiceServicer):
    """For callers of this machine, or for those whom a secret or certificate admits."""

    def __init__(
        self, thread: EngineThread[Any, Any], drain: Callable[[], Awaitable[HandedOver]], *, guarded: bool
    ) -> None:
        """`drain` stops the worker and returns once its sequences are handed over. `guarded`: the port
        demands a secret or certificates."""
        self._thread = thread
        self._drain = drain
        self._guarded = guarded
        self._taking: asyncio.Task[bytes] | None = None

    async def Profile(  # noqa: N802
        self, request: admin_pb2.ProfileRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[admin_pb2.ProfileResponse]:
        """Profile for some seconds, then send the trace."""
        self._check(context)
        call = profile_call_from_proto(request)
        _refuse_name(call.worker)
        if self._taking is not None and not self._taking.done():
            raise ResourceExhaustedError("this worker is taking a profile")
        given_up = asyncio.Event()
        self._taking = asyncio.create_task(self._take(call.seconds, given_up))
        self._taking.add_done_callback(_seen)
        try:
            trace = await asyncio.shield(self._taking)
        except asyncio.CancelledError:
            given_up.set()  # the profiler must still be stopped, on the engine thread
            raise
        for response in profile_responses(trace):
            yield response

    async def Drain(  # noqa: N802
        self, request: admin_pb2.DrainRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> admin_pb2.DrainResponse:
        """Stop, as on SIGTERM; answer once the sequences are handed over."""
        self._check(context)
        _refuse_name(drain_call_from_proto(request).worker)
        handed_over = await self._drain()
        return admin_pb2.DrainResponse(sequences=handed_over.sequences, left=handed_over.left)

    def _check(self, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        if not (self._guarded or is_local_call(context)):
            raise PermissionDeniedError(
                "a worker without a secret or certificates takes orders from callers on its machine only"
            )

    async def _take(self, seconds: float, given_up: asyncio.Event) -> bytes:
        """Profile, or stop at once when the caller is gone. Raises PacelineError."""
        profile = EngineProfile()
        await self._on_engine(lambda: self._begin(profile))
        log.info("a profile of %g seconds is taken", seconds)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await given_up.wait()
        await self._on_engine(lambda: self._end(profile))
        return b"" if given_up.is_set() else await asyncio.to_thread(profile.save)

    def _begin(self, profile: EngineProfile) -> None:
        profile.start()
        self._thread.around_step = profile.step

    def _end(self, profile: EngineProfile) -> None:
        self._thread.around_step = contextlib.nullcontext
        profile.stop()

    async def _on_engine(self, action: Callable[[], None]) -> None:
        """Run between two steps. An error there would end the engine thread, so it is raised here."""

        def guarded() -> Exception | None:
            try:
                action()
            except Exception as error:
                return error
            return None

        error = await ask(self._thread, guarded)
        if isinstance(error, PacelineError):
            raise error
        if error is not None:
            log.error("the profiler failed", exc_info=error)
            raise InternalError("the profiler failed")


def _refuse_name(worker: str) -> None:
    """A caller that names a worker takes this one for a coordinator, and may mean another worker."""
    require(not worker, "worker", "is for coordinators; this is the port of a worker")


def _seen(task: asyncio.Task[bytes]) -> None:
    """Its error is known: it has been raised, or nobody waits for the profile any more."""
    if not task.cancelled():
        task.exception()
