"""Checks before any model is loaded: ports, hosts, files, folders, devices, threads.

Loading a large model takes minutes, so invalid options are reported earlier, by name. This module imports no
compute library.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path

from paceline.assets.checkpoints import check_model, check_tokenizer
from paceline.core.config import CoordinatorConfig, DraftConfig, WorkerConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import read_keys
from paceline.core.security.secret import read_secret
from paceline.core.system.cores import check_threads
from paceline.core.system.gpus import check_gpu
from paceline.core.system.listening import check_ports
from paceline.core.system.small_files import read_text
from paceline.rpc.security.credentials import check_files
from paceline.supervisor.arguments import flag
from paceline.supervisor.devices import kind_of
from paceline.supervisor.stack_config import StackConfig


def check_worker(config: WorkerConfig) -> None:
    """Raises InvalidArgumentError naming a field of the configuration."""
    check_model("model", config.model)
    check_gpu("device", config.device)
    check_threads("threads", config.threads)
    if isinstance(config, DraftConfig) and config.corpus:
        read_text("corpus", config.corpus)
    if config.tls is not None:
        check_files(config.tls)
    read_secret(config.worker_secret_file)
    if config.local_socket and not Path(config.local_socket).absolute().parent.is_dir():
        raise InvalidArgumentError("local_socket", f"the folder of {config.local_socket} does not exist")
    ports = {"port": config.port, "metrics_port": config.metrics_port or 0}
    _check_distinct(ports.items())
    check_ports("host", config.host, ports)


def check_coordinator(config: CoordinatorConfig) -> None:
    """Raises InvalidArgumentError naming a field of the configuration."""
    check_tokenizer("tokenizer", config.tokenizer)
    if config.chat_template:
        read_text("chat_template", config.chat_template)
    if config.api_keys:
        read_keys(Path(config.api_keys))
    for tls, prefix in ((config.tls, "tls"), (config.worker_tls, "worker_tls")):
        if tls is not None:
            check_files(tls, prefix)
    read_secret(config.worker_secret_file)
    ports = {"port": config.port, **_http_port(config)}
    _check_distinct(ports.items())
    check_ports("host", config.host, ports)


def check_stack(config: StackConfig) -> None:
    """Check all processes of a stack. Errors name the stack's options.

    Raises InvalidArgumentError, or TokenizerMismatchError if draft and target cannot be paired.
    """
    if config.certificates and not Path(config.certificates).is_dir():
        raise InvalidArgumentError("certificates", f"{config.certificates} is not a folder")
    coordinator = config.coordinator_config(("127.0.0.1:1",), ())
    workers = {role: config.worker_config(role) for role in config.worker_roles}
    ports = [("port", coordinator.port), *_http_port(coordinator).items()]
    for role, worker in workers.items():
        kind = kind_of(role)
        ports += [(f"{kind}_port", worker.port), (f"{kind}_metrics_port", worker.metrics_port or 0)]
    _check_distinct(ports)
    for role, worker in workers.items():
        with _renaming_fields(lambda field, role=role: _worker_option(config, role, field)):  # type: ignore[misc]
            check_worker(worker)
    with _renaming_fields(lambda field: _coordinator_option(config, field)):
        check_coordinator(coordinator)


def _check_distinct(ports: Iterable[tuple[str, int]]) -> None:
    taken: dict[int, str] = {}
    for field, port in ports:
        if port and port in taken:
            raise InvalidArgumentError(field, f"{port} is also the value of {flag(taken[port])}")
        taken[port] = field


def _http_port(config: CoordinatorConfig) -> dict[str, int]:
    return {"http_port": config.http_port} if config.http else {}


def check_writable(field: str, file: Path) -> None:
    """Create the file if missing and check that it is writable. Raises InvalidArgumentError naming
    `field`."""
    try:
        with file.open("ab"):
            pass
    except OSError as error:
        raise InvalidArgumentError(field, f"{file} cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def _renaming_fields(name: Callable[[str], str]) -> Iterator[None]:
    """Rename the field of an InvalidArgumentError raised inside."""
    try:
        yield
    except InvalidArgumentError as error:
        raise type(error)(name(error.field), error.description) from None


def _worker_option(config: StackConfig, role: str, field: str) -> str:
    """The stack's option for a worker's field: the role's own option, or the common one."""
    if config.certificates and field.startswith("tls_"):
        return "certificates"
    own = f"{kind_of(role)}_{field}"
    return own if own in {f.name for f in fields(config)} else field


def _coordinator_option(config: StackConfig, field: str) -> str:
    if config.certificates and (field.startswith("worker_tls_") or not config.tls_certificate):
        return "certificates" if "tls_" in field else field
    return "target_model" if field == "tokenizer" else field
