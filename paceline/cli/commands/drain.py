"""`paceline drain`: take a worker out of service without a lost stream."""

from __future__ import annotations

from typing import Annotated

import typer

from paceline.cli.connecting import Connection
from paceline.cli.options import option, options_from_fields
from paceline.client.reaching import Reach, checked_address
from paceline.core.errors import DeadlineExceededError
from paceline.rpc.codec.drain import DrainCall
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.credentials import open_channel


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(drain)


@options_from_fields
def drain(
    connection: Connection,
    worker: Annotated[str, typer.Argument(help="The worker's address as in `paceline status`, or its role.")],
    address: Annotated[
        str, option("address", "host:port of the coordinator; a host alone: port 50151.")
    ] = "127.0.0.1",
    seconds: Annotated[float, option("timeout", "Longest wait for the worker's answer.")] = 60.0,
) -> None:
    """Let a worker hand its sequences over to others and stop. Requires an admin key, or without API keys
    the coordinator's machine."""
    import grpc

    from paceline.client.channel import CHANNEL_OPTIONS, call_metadata
    from paceline.v1 import admin_pb2_grpc

    call = DrainCall(worker)
    reach = Reach(checked_address(address), secure=connection.settings is not None)
    with open_channel(reach.address, CHANNEL_OPTIONS, connection.settings) as channel:
        try:
            answer = admin_pb2_grpc.AdminServiceStub(channel).Drain(
                call.to_proto(), metadata=call_metadata(connection.api_key), timeout=seconds
            )
        except grpc.RpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise DeadlineExceededError(
                    f"no answer within {seconds:g} seconds; {worker} may be stopping nevertheless"
                ) from None
            raise reach.told(from_rpc_error(error)) from None
    left = f", {answer.left} of them without another worker" if answer.left else ""
    print(f"{worker} has stopped; sequences that it held: {answer.sequences}{left}")
