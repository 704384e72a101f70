"""Starts, restarts and stops the processes of Paceline on one machine.

Most users need only `serve_stack(StackConfig(...))`; `Supervisor` runs any child processes.
"""

from paceline.supervisor.arguments import arguments, flag
from paceline.supervisor.children import (
    ChildFailedError,
    ChildSpec,
    ChildStatus,
    RestartBackoff,
    Sink,
    Supervisor,
    discard,
    log_to_stderr,
    steps_to,
)
from paceline.supervisor.interrupting import sigterm_as_interrupt
from paceline.supervisor.stack import Stack, serve_stack
from paceline.supervisor.stack_config import StackConfig
from paceline.supervisor.stack_options import StackOptions

__all__ = [
    "ChildFailedError",
    "ChildSpec",
    "ChildStatus",
    "RestartBackoff",
    "Sink",
    "Stack",
    "StackConfig",
    "StackOptions",
    "Supervisor",
    "arguments",
    "discard",
    "flag",
    "log_to_stderr",
    "serve_stack",
    "sigterm_as_interrupt",
    "steps_to",
]
