"""`paceline profile`: where a worker's time goes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.connecting import Connection
from paceline.cli.options import option, options_from_fields
from paceline.client.reaching import Reach, checked_address
from paceline.core.errors import InvalidArgumentError
from paceline.rpc.codec.profile import ProfileCall
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.credentials import open_channel

_GATHERING_SECONDS = 300.0
"""Time that a worker may take to gather and send a profile."""


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(profile)


@options_from_fields
def profile(
    connection: Connection,
    address: Annotated[str, typer.Argument(help="host:port of the coordinator; a host alone: port 50151")],
    seconds: Annotated[float, option("seconds", "How long to profile.")] = 2.0,
    worker: Annotated[
        str, option("worker", "The coordinator's worker: target, draft, or an address; default target.")
    ] = "",
    output: Annotated[Path, option("output", "File for the gzipped Chrome trace.", dir_okay=False)] = Path(
        "profile.json.gz"
    ),
) -> None:
    """Profile a worker by torch.profiler. Requires an admin key, or without API keys the coordinator's
    machine."""
    import grpc

    from paceline.client.channel import CHANNEL_OPTIONS, call_metadata
    from paceline.v1 import admin_pb2_grpc

    call = ProfileCall(seconds, worker)
    if not os.access(output.absolute().parent, os.W_OK):
        raise InvalidArgumentError(
            "output", f"{output.absolute().parent} is not a folder that can be written"
        )
    reach = Reach(checked_address(address), secure=connection.settings is not None)
    print(f"profiling for {seconds:g} seconds", file=sys.stderr)
    with open_channel(reach.address, CHANNEL_OPTIONS, connection.settings) as channel:
        responses = admin_pb2_grpc.AdminServiceStub(channel).Profile(
            call.to_proto(), metadata=call_metadata(connection.api_key), timeout=seconds + _GATHERING_SECONDS
        )
        try:
            trace = b"".join(response.trace for response in responses)
        except grpc.RpcError as error:
            raise reach.told(from_rpc_error(error)) from None
    output.write_bytes(trace)
    print(f"{output}: {len(trace):,} bytes; https://ui.perfetto.dev shows it")
