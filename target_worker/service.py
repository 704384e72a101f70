"""The target worker's gRPC service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from paceline.rpc.streams import frames
from paceline.rpc.streams.worker_stream import FrameCodec, serve_stream
from paceline.v1 import target_pb2, target_pb2_grpc
from paceline.worker_process import WorkerShell

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
        """Describe this worker: model, limits, cache."""
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


def register(shell: WorkerShell, server: grpc.aio.Server) -> None:
    """Add the service to a server."""
    target_pb2_grpc.add_TargetServiceServicer_to_server(TargetService(shell), server)
