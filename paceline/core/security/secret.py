"""The secret that the processes of one service share. A coordinator shows it to every worker that it calls.

It comes from a file or from the environment, which other users of the machine cannot read; a command line
they can. It is not for clients: these have API keys.
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
"""The environment variable that holds it where no file is named."""
METADATA_KEY: Final = "paceline-worker-secret"
"""Under which a call to a worker shows it."""
SHORTEST, LONGEST = 16, 512
"""Bounds of its length, in characters."""


@dataclass(frozen=True, slots=True)
class WorkerSecret:
    """Printable ASCII without spaces. Its `repr` does not show it."""

    text: str = field(repr=False)
    name: str = field(default=VARIABLE, repr=False, compare=False)
    """The setting that errors name."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the setting; its text holds nothing of the secret."""
        if not SHORTEST <= len(self.text) <= LONGEST:
            raise InvalidArgumentError(self.name, f"must have {SHORTEST} to {LONGEST} characters")
        if not (self.text.isascii() and self.text.isprintable()) or " " in self.text:
            raise InvalidArgumentError(self.name, "must be printable ASCII without spaces")

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call to a worker carries."""
        return ((METADATA_KEY, self.text),)

    def check(self, metadata: Iterable[tuple[str, str | bytes]]) -> None:
        """Raises UnauthenticatedError unless a call's metadata shows it, once.

        Takes as long for every text of the same length.
        """
        shown = [value for key, value in metadata if key == METADATA_KEY]
        given = shown[0] if len(shown) == 1 else ""
        encoded = given.encode("utf-8", "surrogatepass") if isinstance(given, str) else given
        if not hmac.compare_digest(encoded, self.text.encode()):
            raise UnauthenticatedError("the secret of this service's workers is required")

    def derived(self, purpose: str) -> bytes:
        """A key of 32 bytes for one purpose, which tells nothing of the secret."""
        return hmac.digest(self.text.encode(), purpose.encode(), hashlib.sha256)


def new_secret() -> str:
    """256 random bits."""
    return secrets.token_urlsafe(32)


def read_secret(file: str, environment: Mapping[str, str] = os.environ) -> WorkerSecret | None:
    """From the file, else from the environment; None where neither names one.

    Raises InvalidArgumentError naming `worker_secret_file` or the variable.
    """
    if not file:
        text = environment.get(VARIABLE, "")
        return WorkerSecret(text) if text else None
    name = "worker_secret_file"
    return WorkerSecret(read_text(name, file).strip(), name)
