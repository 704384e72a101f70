"""Every error Paceline raises on purpose.

PacelineError
├── InvalidArgumentError        a field cannot be honoured; `field` names it (also a ValueError)
│   ├── TokenizerMismatchError  draft and target do not share a vocabulary
│   └── AlreadyExistsError      the chosen name is in use
├── NotFoundError               no such sequence, model or request
├── FailedPreconditionError     the sender's picture is behind; `known_length` says where to resend from
├── StaleEpochError             a newer owner has taken the sequence over
├── ResourceExhaustedError      a bound was met: blocks, queue, streams
├── UnauthenticatedError        no API key, or none that is known here
├── PermissionDeniedError       known, but not allowed to do this
├── UnavailableError            nobody can do this now; `last_index` says what the client already has
├── DeadlineExceededError       the time the caller gave is over
├── CancelledError              the caller went away
└── InternalError               a defect or a broken model; the message never holds user text

Messages are written for the person who sent the request. They never contain prompt text.
"""

from __future__ import annotations


class PacelineError(Exception):
    """Root of the tree. `message` is safe to show to a client."""

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
    """Two models that must share a tokenizer do not."""


class AlreadyExistsError(InvalidArgumentError):
    """Something that runs has the name that was chosen."""


class NotFoundError(PacelineError):
    """The named thing is not (or no longer) here."""


class FailedPreconditionError(PacelineError):
    """The receiver knows only `known_length` tokens of the sequence; resend from there."""

    def __init__(self, message: str, known_length: int = 0) -> None:
        super().__init__(message)
        self.known_length = known_length


class StaleEpochError(PacelineError):
    """A command of an older epoch: its sender no longer owns the sequence."""


class ResourceExhaustedError(PacelineError):
    """A bound was met. `retry_after` is in seconds; None where nobody knows when there will be room."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class UnauthenticatedError(PacelineError):
    """The caller did not prove who it is. The message does not say what was wrong with the proof."""


class PermissionDeniedError(PacelineError):
    """The caller is known and may not do this."""


class UnavailableError(PacelineError):
    """Nobody can serve this now. `last_index` is the index of the last token that was committed; None where
    none was, and so it is where -1 is given, which stands before the first."""

    def __init__(self, message: str, last_index: int | None = None) -> None:
        super().__init__(message)
        self.last_index = None if last_index is not None and last_index < 0 else last_index


class DeadlineExceededError(PacelineError):
    """The caller's deadline passed."""


class CancelledError(PacelineError):
    """The caller cancelled."""


class InternalError(PacelineError):
    """A defect, or a model that produced no usable numbers."""


def in_one_line(error: BaseException) -> str:
    """All that an error of somebody else's says, its lines joined; its kind where it says nothing.

    It may hold paths and addresses: for whoever starts a process, not for clients.
    """
    return " ".join(str(error).split()) or type(error).__name__
