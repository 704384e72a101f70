"""The exceptions of Paceline.

PacelineError
├── InvalidArgumentError        a field cannot be honoured; `field` names it (also a ValueError)
│   ├── TokenizerMismatchError  draft and target do not share a vocabulary
│   └── AlreadyExistsError      the chosen name is in use
├── NotFoundError               no such sequence, model or request
├── FailedPreconditionError     the receiver lacks tokens; `known_length` says where to resend from
├── StaleEpochError             a newer owner has taken over the sequence
├── ResourceExhaustedError      a bound was reached: blocks, queue, streams
├── UnauthenticatedError        no API key, or an unknown one
├── PermissionDeniedError       the caller is known but not allowed to do this
├── UnavailableError            no process can serve this now; `last_index` says what the client already has
├── DeadlineExceededError       the caller's deadline passed
├── CancelledError              the caller went away
└── InternalError               a defect or a broken model

Messages address the sender of the request. They never contain prompt or generated text.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Base class. `message` is safe to show to a client."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class InvalidArgumentError(PacelineError, ValueError):
    """A field of a request or a configuration cannot be honoured."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.description = message


class TokenizerMismatchError(InvalidArgumentError):
    """Two models that must share a tokenizer have different ones."""


class AlreadyExistsError(InvalidArgumentError):
    """The chosen name is in use."""


class NotFoundError(PacelineError):
    """The named object does not exist, or no longer exists."""


class FailedPreconditionError(PacelineError):
    """The receiver knows only `known_length` tokens of the sequence; resend from there."""

    def __init__(self, message: str, known_length: int = 0) -> None:
        super().__init__(message)
        self.known_length = known_length


class StaleEpochError(PacelineError):
    """The command has an older epoch: its sender no longer owns the sequence."""


class ResourceExhaustedError(PacelineError):
    """A bound was reached. `retry_after` is in seconds; None if unknown."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthenticatedError(PacelineError):
    """The caller is not authenticated. The message does not reveal why."""


class PermissionDeniedError(PacelineError):
    """The caller is known but not allowed to do this."""


class UnavailableError(PacelineError):
    """No process can serve this now. `last_index` is the index of the last committed token, or None if there
    is none; a negative argument becomes None."""

    def __init__(self, message: str, last_index: int | None = None) -> None:
        super().__init__(message)
        self.last_index = None if last_index is not None and last_index < 0 else last_index


class DeadlineExceededError(PacelineError):
    """The caller's deadline passed."""


class CancelledError(PacelineError):
    """The caller cancelled."""


class InternalError(PacelineError):
    """A defect, or a model that produced unusable numbers."""


def in_one_line(error: BaseException) -> str:
    """A foreign error's text on one line, or its class name if the text is empty.

    The text may contain paths and addresses, so it is for operators and never for clients.
    """
    return " ".join(str(error).split()) or type(error).__name__
