"""Serving commands for the whole stack or a single process, and the health check."""

from __future__ import annotations

import sys
from dataclasses import fields, replace
from importlib.metadata import version
from typing import Annotated, Any, NoReturn

import typer

from paceline.cli.connecting import Transport
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.client.reaching import DEFAULT_PORT, Reach, checked_address
from paceline.core.config import (
    MODEL_DRAFTER,
    CoordinatorConfig,
    DraftConfig,
    TargetConfig,
    WorkerConfig,
    check_dtype,
)
from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.core.system.cores import check_threads
from paceline.core.system.exit import leave
from paceline.core.system.gpus import check_gpu
from paceline.core.system.own_packages import check_ours
from paceline.core.system.small_files import read_text
from paceline.core.validation import device as check_device
from paceline.rpc.codec.status import from_rpc_error
from paceline.rpc.security.credentials import open_channel
from paceline.supervisor import (
    Stack,
    StackConfig,
    StackOptions,
    log_to_stderr,
    serve_stack,
    sigterm_as_interrupt,
)
from paceline.supervisor.preflight import check_coordinator, check_worker
from paceline.telemetry.logs import child_lines_to_stderr, configure_logging
from paceline.telemetry.steps import LOADING_LIBRARIES, step

DEFAULT_HTTP_PORT = 8000
EMBEDDED_TARGET, EMBEDDED_DRAFT = "embedded:target", "embedded:draft"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(serve)
    app.command()(coordinator)
    app.command("draft-worker")(draft_worker)
    app.command("target-worker")(target_worker)
    app.command()(health)


@options_from_fields
def serve(
    options: Annotated[
        StackOptions,
        Defaults(
            {"port": DEFAULT_PORT, "http_port": DEFAULT_HTTP_PORT, "target_model": "", "draft_model": []}
        ),
    ],
    model: Annotated[
        str | None,
        typer.Argument(help="The target model: the same as --target-model.", show_default=False),
    ] = None,
    device: Annotated[str, option("device", "Device of both workers, unless set per worker.")] = "auto",
    dtype: Annotated[str, option("dtype", "Number format of both workers, unless set per worker.")] = "auto",
    threads: Annotated[
        int, option("threads", "CPU threads of each worker, unless set per worker; 0 divides the cores.")
    ] = 0,
) -> None:
    """Run a coordinator, a target worker and draft workers (unless `--draft-model none`) on this machine."""
    config = _checked(_with_models(options, model), device=device, dtype=dtype, threads=threads)
    _check_template(config.chat_template)
    configure_logging("supervisor", config.log_format)
    step(
        "Paceline %s starting with the target %s and %s",
        version("paceline"),
        config.target_model,
        " and ".join(f"the draft {name}" for name in _drafters(config))
        or "no draft (--draft-model sets one)",
    )
    sink = child_lines_to_stderr if config.log_format == "json" else log_to_stderr
    try:
        with sigterm_as_interrupt(), serve_stack(config, sink=sink) as stack:
            _announce(stack)
            stack.wait()
    except KeyboardInterrupt:
        print("stopped", flush=True)


def _with_models(options: StackOptions, model: str | None) -> StackOptions:
    """Add the positional target model and the default draft.

    The embedded draft is the default only for the embedded target, because others have another tokenizer. A
    drafter without a model takes the target's tokenizer.
    """
    if model is not None and options.target_model not in ("", model):
        raise InvalidArgumentError(
            "target_model", f"is {options.target_model}, but MODEL is {model}: give only one"
        )
    target = model or options.target_model or EMBEDDED_TARGET
    default = EMBEDDED_DRAFT if target == EMBEDDED_TARGET else "none"
    draft = options.draft_model or (default if options.drafter == MODEL_DRAFTER else target)
    return replace(options, target_model=target, draft_model=draft)


def _check_template(file: str) -> None:
    """Raises InvalidArgumentError naming `chat_template` for an invalid template."""
    if not file:
        return
    check_ours("coordinator")
    from coordinator.api.chat_template import ChatTemplate

    ChatTemplate(read_text("chat_template", file))


def _checked(options: StackOptions, **of_both: Any) -> StackConfig:
    """The configuration with the common settings `of_both` for each worker that leaves them at the default.

    Raises InvalidArgumentError naming the field.
    """
    check_gpu("device", check_device("device", of_both["device"]))
    check_dtype("dtype", of_both["dtype"])
    check_threads("threads", of_both["threads"])
    values = {f.name: getattr(options, f.name) for f in fields(options)}
    if options.draft_model in ("none", ("none",)):
        values["draft_model"] = None
    roles = ("target", "draft") if values["draft_model"] else ("target",)
    for role in roles:
        for name, value in of_both.items():
            if values[f"{role}_{name}"] in ("auto", 0):
                values[f"{role}_{name}"] = value
    return StackConfig(**values)


def _announce(stack: Stack) -> None:
    config = stack.config
    models = (config.target_model, *_drafters(config))
    lines = [
        f"{role} worker: {model} at {stack.address_of(role)}"
        for role, model in zip(config.worker_roles, models, strict=True)
    ]
    coordinator = stack.supervisor.status("coordinator")
    if coordinator.http_address:
        scheme = "http" if stack.coordinator_tls is None else "https"
        lines.append(f"OpenAI-compatible HTTP at {scheme}://{coordinator.http_address}/v1")
    lines.append(f"Paceline listens on {coordinator.address}")
    # One write, so that children's logs on the same terminal cannot come between the lines.
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


def _drafters(config: StackConfig) -> tuple[str, ...]:
    """What drafts in each draft worker: its model, or the drafter without one."""
    models = config.draft_models
    return models if config.drafter == MODEL_DRAFTER else (config.drafter,) * len(models)


@options_from_fields
def coordinator(config: CoordinatorConfig) -> None:
    """Run only a coordinator; its workers run elsewhere."""
    check_coordinator(config)
    _check_template(config.chat_template)
    check_ours("coordinator")
    from coordinator.main import run

    run(config)


@options_from_fields
def draft_worker(config: DraftConfig) -> None:
    """Run only a draft worker."""
    check_worker(config)
    check_ours("draft_worker")
    _tell_of_libraries("draft", config)
    from draft_worker.main import run

    run(config)
    _leave()


@options_from_fields
def target_worker(config: TargetConfig) -> None:
    """Run only a target worker."""
    check_worker(config)
    check_ours("target_worker")
    _tell_of_libraries("target", config)
    from target_worker.main import run

    run(config)
    _leave()


def _tell_of_libraries(role: str, config: WorkerConfig) -> None:
    """Log the first step of a worker, the import of torch."""
    configure_logging(role, config.log_format, named_by_parent=config.exit_with_parent)
    step(LOADING_LIBRARIES)


def _leave() -> NoReturn:
    """Exit at once after all streams have ended.

    The interpreter's shutdown would take more than a second and delay a restart.
    """
    leave(0)


@options_from_fields
def health(
    transport: Transport,
    address: Annotated[str, typer.Argument(help="host:port of any process")],
    service: Annotated[str, option("service", "Full name of a gRPC service; empty for the process.")] = "",
    timeout: Annotated[float, option("timeout", "Seconds to wait for the answer.")] = 5.0,
) -> None:
    """Check whether a process is serving (grpc.health.v1). The exit code is 0 if so, else 1."""
    import grpc
    from grpc_health.v1 import health_pb2

    reach = Reach(checked_address(address), secure=transport.settings is not None)
    with open_channel(reach.address, (), transport.settings) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            response = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout)
        except grpc.RpcError as error:
            raise reach.told(from_rpc_error(error)) from None
    state = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    if response.status != health_pb2.HealthCheckResponse.SERVING:
        raise UnavailableError(f"{address}: {state}")
    print(state)
