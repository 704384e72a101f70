"""The secret of all stacks of a test process, so that its coordinators and streams may call workers."""

from __future__ import annotations

from paceline.core.security.secret import VARIABLE, WorkerSecret, new_secret

SECRET = WorkerSecret(new_secret())
ENVIRONMENT = {VARIABLE: SECRET.text}
"""For the processes of a stack."""
