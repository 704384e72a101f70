"""Commands that serve: the whole stack, or one process of it; and the health check of any."""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from typing import Annotated, Any, NoReturn

import typer

from paceline.cli.connecting import DEFAULT_PORT, Transport
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.core.errors import UnavailableError
from paceline.core.leaving import leave
from paceline.rpc.credentials import open_channel
from paceline.rpc.status import from_rpc_error
from paceline.supervisor import (
    Stack,
    StackConfig,
    StackOptions,
    log_to_stderr,
    serve_stack,
    sigterm_as_interrupt,
)
from paceline.supervisor.forking import await_arguments
from paceline.telemetry.logs import child_lines_to_stderr, configure_logging

DEFAULT_HTTP_PORT = 8000


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(serve)
    app.command()(coordinator)
    app.command("draft-worker")(draft_worker)
    app.command("target-worker")(target_worker)
    app.command("fork-server", hidden=True)(fork_server)
    app.command()(health)


@options_from_fields
def serve(
    options: Annotated[StackOptions, Defaults({"port": DEFAULT_PORT, "http_port": DEFAULT_HTTP_PORT})],
    device: Annotated[str, option("device", "Device of both workers, where not given singly.")] = "auto",
    dtype: Annotated[str, option("dtype", "Number format of both workers, where not given singly.")] = "auto",
    threads: Annotated[
        int, option("threads", "CPU threads of each worker, where not given singly; 0 shares the cores.")
    ] = 0,
) -> None:
    """Run coordinator, target worker and draft worker on this machine (`--draft-model none`: no draft)."""
    config = _checked(options, device=device, dtype=dtype, threads=threads)
    configure_logging("supervisor", config.log_format)
    sink = child_lines_to_stderr if config.log_format == "json" else log_to_stderr
    try:
        with sigterm_as_interrupt(), serve_stack(config, sink=sink) as stack:
            _announce(stack)
            stack.wait()
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _checked(options: StackOptions, **of_both: Any) -> StackConfig:
    """What is asked for, with `of_both` for each worker that leaves it open: `auto`, or 0 threads.

    Raises InvalidArgumentError naming the field; nothing is refused before all of it is known.
    """
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    if options.draft_model == "none":
        values["draft_model"] = None
    roles = ("target", "draft") if values["draft_model"] else ("target",)
    for role in roles:
        for name, value in of_both.items():
            if values[f"{role}_{name}"] in ("auto", 0):
                values[f"{role}_{name}"] = value
    return StackConfig(**values)


def _announce(stack: Stack) -> None:
    models = {"target": stack.config.target_model, "draft": stack.config.draft_model}
    for role in stack.config.worker_roles:
        print(f"{role} worker: {models[role]} at {stack.address_of(role)}")
    coordinator = stack.supervisor.status("coordinator")
    if coordinator.http_address:
        scheme = "http" if stack.coordinator_tls is None else "https"
        print(f"OpenAI-compatible HTTP at {scheme}://{coordinator.http_address}/v1")
    print(f"Paceline listens on {coordinator.address}", flush=True)


@options_from_fields
def coordinator(config: CoordinatorConfig) -> None:
    """Run a coordinator alone; its workers run elsewhere."""
    from coordinator.main import run

    run(config)


@options_from_fields
def draft_worker(config: DraftConfig) -> None:
    """Run a draft worker alone."""
    from draft_worker.main import run

    run(config)
    _leave()


@options_from_fields
def target_worker(config: TargetConfig) -> None:
    """Run a target worker alone."""
    from target_worker.main import run

    run(config)
    _leave()


def fork_server(control: int) -> None:
    """Load what workers need, and be forked for each of them; of use to the supervisor alone."""
    # A thread of another library would forbid it, and what numpy is asked for here is no work for several.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    import draft_worker.main  # noqa: F401
    import target_worker.main  # noqa: F401
    from paceline.cli.app import main
    from paceline.decoding.on_disk import prepare_to_load

    prepare_to_load()
    arguments = await_arguments(socket.socket(fileno=control))
    if arguments is None:
        _leave()
    main(arguments)


def _leave() -> NoReturn:
    """End a process whose work is done and whose streams have ended.

    The interpreter would take more than a second to free, module by module, what the system frees at once;
    whoever waits for the end, or restarts a worker, would wait with it.
    """
    leave(0)


@options_from_fields
def health(
    transport: Transport,
    address: Annotated[str, typer.Argument(help="host:port of any process")],
    service: Annotated[str, option("service", "A gRPC service's full name; empty asks for the whole.")] = "",
    timeout: Annotated[float, option("timeout", "Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Ask a process whether it is serving (grpc.health.v1); exit code 0 if so, else 1."""
    import grpc
    from grpc_health.v1 import health_pb2

    with open_channel(address, (), transport.settings) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            response = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{address}: {state}")
    print(state)
