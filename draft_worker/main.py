"""The draft worker's process and its gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_worker.drafters.registry import kind_of
from draft_worker.engine import DraftEngine
from draft_worker.sub_drafters import sub_drafter_of
from paceline.core.clock import monotonic
from paceline.core.config import DraftConfig
from paceline.engine.loading.build import Built
from paceline.engine.scheduling.mask import grammars_of
from paceline.rpc.streams import frames
from paceline.rpc.streams.worker_stream import FrameCodec, serve_stream
from paceline.telemetry.worker import WorkerObserver
from paceline.v1 import draft_pb2, draft_pb2_grpc
from paceline.worker_process import Role, WorkerShell
from paceline.worker_process import run as run_worker

FRAME_CODEC = FrameCodec(draft_pb2.DraftRequest, frames.draft_commands, frames.draft_response)


class DraftService(draft_pb2_grpc.DraftServiceServicer):
    """Propose tokens to coordinators."""

    def __init__(self, shell: WorkerShell) -> None:
        self._shell = shell

    async def GetWorkerInfo(  # noqa: N802
        self,
        request: draft_pb2.DraftServiceGetWorkerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.DraftServiceGetWorkerInfoResponse:
        """What this worker is and has."""
        return draft_pb2.DraftServiceGetWorkerInfoResponse(info=await self._shell.info())

    async def Draft(  # noqa: N802
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        """Carry one coordinator's rounds."""
        stream = serve_stream(
            request_iterator,
            context,
            self._shell.guard,
            FRAME_CODEC,
            self._shell.stopping,
        )
        async for frame in stream:
            yield frame


def _load(config: DraftConfig) -> Built:
    sub_drafter_of(config)  # an unknown one is refused before anything is loaded
    return kind_of(config).load(config)


def _make_engine(built: Built, config: DraftConfig, observer: WorkerObserver) -> DraftEngine:
    return DraftEngine(
        kind_of(config).make(built, config, monotonic),
        config,
        vocabulary_size=built.loaded.vocab_size,
        max_model_len=built.max_model_len,
        eos_token_ids=sorted(built.loaded.eos_token_ids),
        grammars=grammars_of(built.loaded),
        observer=observer,
    )


def _register(shell: WorkerShell, server: grpc.aio.Server) -> None:
    draft_pb2_grpc.add_DraftServiceServicer_to_server(DraftService(shell), server)


ROLE = Role("draft", "draft", "paceline.v1.DraftService", _load, _make_engine, _register, FRAME_CODEC)


def run(config: DraftConfig) -> None:
    """Serve until told to stop."""
    run_worker(ROLE, config)
