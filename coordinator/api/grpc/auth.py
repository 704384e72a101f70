"""Authentication of the gRPC API, and the file of API keys."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc

from coordinator.auth import Gate, bearer, principal
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import PacelineError
from paceline.core.security.keyfile import read_keys
from paceline.rpc.security.auth import is_open
from paceline.rpc.security.credentials import is_loopback
from paceline.rpc.server.error_guard import refusal

log = logging.getLogger(__name__)

_SERVICE = "/paceline.v1.GenerationService/"
CHARGED_LATER = frozenset({f"{_SERVICE}Generate", f"{_SERVICE}Cancel"})
"""Methods that are not charged to a key's rate on arrival. Cancelling must always be possible, and only the
request itself shows whether a call begins or resumes one."""


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Authenticates each call before its message is read, and passes the caller to the handler.

    Every method needs a key, including unknown ones; only the health service is open.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The method's handler, or a handler that refuses the call."""
        if not is_open(handler_call_details.method):
            metadata: Any = handler_call_details.invocation_metadata or ()
            try:
                caller = self._gate.recognise(bearer(v for k, v in metadata if k == "authorization"))
                principal.set(caller)
                if handler_call_details.method not in CHARGED_LATER:
                    self._gate.charge()
            except PacelineError as error:
                return refusal(error)
        return await continuation(handler_call_details)


def make_gate(config: CoordinatorConfig) -> Gate:
    """The gate of this process. Raises InvalidArgumentError naming `api_keys`."""
    return Gate(read_keys(Path(config.api_keys)) if config.api_keys else None)


def reload_on_hangup(gate: Gate, config: CoordinatorConfig) -> None:
    """Reload the file of keys on SIGHUP. A file that cannot be used changes nothing."""
    if not config.api_keys:
        return

    def reload() -> None:
        try:
            keys = read_keys(Path(config.api_keys))
        except PacelineError as error:
            log.error("the API keys are unchanged: %s", error)  # noqa: TRY400 - the message says it all
            return
        gate.replace(keys)
        log.info("%d API keys are in use", len(keys.keys))

    with contextlib.suppress(NotImplementedError):
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)


def warn_if_open(config: CoordinatorConfig) -> None:
    """Log a warning if other machines can reach an unprotected port."""
    if is_loopback(config.host):
        return
    missing = [
        what
        for what, there in (("TLS", config.tls is not None), ("API keys", bool(config.api_keys)))
        if not there
    ]
    if missing:
        log.warning(
            "listening on %s without %s: anyone who can reach it can use it",
            config.host,
            " and ".join(missing),
        )
