"""The shared secret that authenticates a coordinator to its workers. Clients have API keys instead.

It comes from a file or the environment because other users of the machine can read command lines.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

from paceline.core.errors import InvalidArgumentError, UnauthenticatedError
from paceline.core.system.small_files import read_text

VARIABLE: Final = "PACELINE_WORKER_SECRET"
"""The environment variable with the secret if no file is given."""
METADATA_KEY: Final = "paceline-worker-secret"
"""The metadata key of the secret in calls to workers."""
SHORTEST, LONGEST = 16, 512
"""Bounds of the secret's length, in characters."""


@dataclass(frozen=True, slots=True)
class WorkerSecret:
    """A secret of printable ASCII without spaces. Its `repr` does not reveal it."""

    text: str = field(repr=False)
    name: str = field(default=VARIABLE, repr=False, compare=False)
    """The setting's name in errors."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the setting; the message does not reveal the secret."""
        if not SHORTEST <= len(self.text) <= LONGEST:
            raise InvalidArgumentError(self.name, f"must have {SHORTEST} to {LONGEST} characters")
        if not (self.text.isascii() and self.text.isprintable()) or " " in self.text:
            raise InvalidArgumentError(self.name, "must be printable ASCII without spaces")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Metadata for calls to workers."""
        return ((METADATA_KEY, self.text),)

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError unless a call's metadata has the secret exactly once.

        The time does not depend on how much of the secret matches.
        """
        shown = [value for key, value in metadata if key == METADATA_KEY]
        given = shown[0] if len(shown) == 1 else ""
        encoded = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
        if not hmac.compare_digest(encoded, self.text.encode()):
            raise UnauthenticatedError("the worker secret of this service is required")

    def derived(self, purpose: str) -> bytes:
        """A 32-byte key for one purpose, which does not reveal the secret."""
        return hmac.digest(self.text.encode(), purpose.encode(), hashlib.sha256)


def new_secret() -> str:
    """A secret of 256 random bits."""
    return secrets.token_urlsafe(32)


def read_secret(file: str, environment: Mapping[str, str] = os.environ) -> WorkerSecret | None:
    """The secret from the file, else from the environment; None without either.

    Raises InvalidArgumentError naming `worker_secret_file` or the variable.
    """
    if not file:
        text = environment.get(VARIABLE, "")
        return WorkerSecret(text) if text else None
    name = "worker_secret_file"
    return WorkerSecret(read_text(name, file).strip(), name)
