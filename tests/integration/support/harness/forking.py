"""One fork server for all workers of a test process: each start by itself would import their libraries."""

from __future__ import annotations

import atexit
import functools

from paceline.core.secret import VARIABLE, WorkerSecret, new_secret
from paceline.supervisor import ForkServer
from paceline.supervisor.processes import CAN_FORK
from paceline.supervisor.stack import paceline_fork_server

SECRET = WorkerSecret(new_secret())
"""Of all stacks of this test process, so that coordinators and streams of tests may call their workers."""
ENVIRONMENT = {"PYTEST_CURRENT_TEST": "", VARIABLE: SECRET.text}
"""pytest changes the first with every test, and processes of another environment are not forked."""


@functools.cache
def fork_server() -> ForkServer | None:
    """Started when first asked for; it ends with this process. None where the system knows none."""
    if not CAN_FORK:
        return None
    server = paceline_fork_server(ENVIRONMENT)
    atexit.register(server.close)
    server.wait_until_loaded(300.0)
    return server
