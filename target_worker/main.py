"""The target worker's process and its gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.core.config import TargetConfig
from paceline.engine.loading.build import Built, build
from paceline.engine.scheduling.mask import grammars_of
from paceline.rpc.streams import frames
from paceline.rpc.streams.worker_stream import FrameCodec, serve_stream
from paceline.telemetry.worker import WorkerObserver
from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.worker_process import Role, WorkerShell
from paceline.worker_process import run as run_worker
from target_worker.decide import warm_up
from target_worker.verifier import Verifier

FRAME_CODEC = FrameCodec(target_pb2.VerifyRequest, frames.target_commands, frames.verify_response)


class TargetService(target_pb2_grpc.TargetServiceServicer):
    """Verify proposals for coordinators."""

    def __init__(self, shell: WorkerShell) -> None:
        self._shell = shell

    async def GetWorkerInfo(  # noqa: N802
        self,
        request: target_pb2.TargetServiceGetWorkerInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> target_pb2.TargetServiceGetWorkerInfoResponse:
        """What this worker is and has."""
        return target_pb2.TargetServiceGetWorkerInfoResponse(info=await self._shell.info())

    async def Verify(  # noqa: N802
        self,
        request_iterator: AsyncIterator[target_pb2.VerifyRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[target_pb2.VerifyResponse]:
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


def _make_verifier(built: Built, config: TargetConfig, observer: WorkerObserver) -> Verifier:
    assert built.runner is not None
    warm_up(built.runner.device)
    return Verifier(
        built.runner,
        config,
        vocabulary_size=built.loaded.vocab_size,
        max_model_len=built.max_model_len,
        eos_token_ids=sorted(built.loaded.eos_token_ids),
        grammars=grammars_of(built.loaded),
        observer=observer,
    )


def _register(shell: WorkerShell, server: grpc.aio.Server) -> None:
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetService(shell), server)


ROLE = Role("target", "verify", "paceline.v1.TargetService", build, _make_verifier, _register, FRAME_CODEC)


def run(config: TargetConfig) -> None:
    """Serve until told to stop."""
    run_worker(ROLE, config)
