"""Log lines, as text or JSON, without prompts, outputs or token ids.

Paceline's own messages never contain them. The text of a foreign exception might, so only its type and
traceback are logged. Additional fields are passed with `fields(...)`; other attributes of a record are
dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, TextIO

from paceline.core.errors import InvalidArgumentError, PacelineError

log = logging.getLogger(__name__)

WITHHELD = "(its text is not logged)"
_LEVEL_VARIABLE = "PACELINE_LOG_LEVEL"
_LEVELS = frozenset({"DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"})
_BARE = re.compile(r"""[^\s="'\\]+""")
"""Values that need no quotes in a text line."""
_CHILD_LINE = re.compile(r"\[([^\]]+)\] (.*)", re.DOTALL)

context: ContextVar[Mapping[str, Any] | None] = ContextVar("paceline_log_context", default=None)
"""Fields of all log lines of the current call, such as its `request_id`."""


def fields(**values: Any) -> dict[str, Any]:
    """Fields of one log line, for `extra=`. None values are omitted."""
    return {"fields": {name: value for name, value in values.items() if value is not None}}


def may_show(error: BaseException) -> bool:
    """Whether an exception's text certainly contains no request data.

    True for Paceline's errors, for errors of the operating system (files and ports), and for plain
    RuntimeErrors, which torch and gRPC raise about devices and shapes.
    """
    return isinstance(error, PacelineError | OSError | MemoryError) or type(error) is RuntimeError


def summary(error: BaseException) -> str:
    """The exception's type, and its text if allowed."""
    kind = type(error)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    return f"{name}: {_indented(str(error)) if may_show(error) else WITHHELD}"


def told(error: BaseException) -> str:
    """A traceback with causes, as Python prints it, without texts that must not be logged."""
    chain = list(_chain(error))
    return "\n\nwhile handling this:\n\n".join(_single_traceback(each) for each in reversed(chain))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _single_traceback(error: BaseException) -> str:
    places = "".join(traceback.format_tb(error.__traceback__))
    lines = f"Traceback (most recent call last):\n{places}{summary(error)}"
    if isinstance(error, BaseExceptionGroup):
        lines += "".join(f"\n  including {told(each)}" for each in error.exceptions)
    return lines


class _Formatter(logging.Formatter):
    """Common parts of both formats."""

    def __init__(self, role: str, *, named_by_parent: bool = False) -> None:
        shown = "" if named_by_parent else f"{role} "
        super().__init__(f"%(asctime)s {shown}%(levelname)s %(name)s: %(message)s")
        self._role = role

    def formatException(  # noqa: N802 - the name is logging's
        self,
        ei: tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None],
    ) -> str:
        return told(ei[1]) if ei[1] is not None else ""

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return stack_info

    @staticmethod
    def _fields(record: logging.LogRecord) -> dict[str, Any]:
        return {**(context.get() or {}), **getattr(record, "fields", {})}

    @staticmethod
    def _message(record: logging.LogRecord) -> str:
        message = record.getMessage()
        # asyncio appends lines with the repr of a task and of its exception.
        return message.partition("\n")[0] if record.name == "asyncio" else message


class TextFormatter(_Formatter):
    """A readable line, followed by fields as name=value (logfmt)."""

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802
        record.message = _indented(self._message(record))
        line = super().formatMessage(record)
        return " ".join([line, *(f"{name}={_plain(value)}" for name, value in self._fields(record).items())])


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = ",".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
    # Some values come from clients: none may look like another field or another line.
    if _BARE.fullmatch(text) and text.isprintable():
        return text
    return json.dumps(text, ensure_ascii=not text.isprintable())


def _indented(text: str) -> str:
    """Indent continuation lines, so that they do not look like log lines."""
    return "\n    ".join(text.splitlines())


class JsonFormatter(_Formatter):
    """One JSON object per line: time, level, role, logger, message, then fields."""

    def format(self, record: logging.LogRecord) -> str:
        line = _head(record.created, record.levelname, self._role, record.name, self._message(record))
        for name, value in self._fields(record).items():
            line.setdefault(name, value)
        if record.exc_info and record.exc_info[1] is not None:
            line["exception"] = told(record.exc_info[1])
        return json.dumps(line, default=str)


def _head(created: float, level: str, role: str, logger: str, message: str) -> dict[str, Any]:
    moment = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds")
    return {"time": moment, "level": level, "role": role, "logger": logger, "message": message}


def configure_logging(
    role: str, log_format: str = "text", stream: TextIO | None = None, *, named_by_parent: bool = False
) -> None:
    """Send all log lines of this process to standard error; standard output is for the announcement.

    With `named_by_parent`, the parent process prefixes each line with the role, so text lines omit it.
    Warnings and uncaught exceptions are logged too. Raises InvalidArgumentError if PACELINE_LOG_LEVEL is
    invalid.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        JsonFormatter(role) if log_format == "json" else TextFormatter(role, named_by_parent=named_by_parent)
    )
    logging.basicConfig(level=_level(), handlers=[handler], force=True)
    logging.captureWarnings(True)
    sys.excepthook = _uncaught
    threading.excepthook = _uncaught_in_thread


def _level() -> str:
    name = os.environ.get(_LEVEL_VARIABLE, "INFO")
    # Not every level that `logging` knows: libraries register levels of their own.
    if name.upper() not in _LEVELS:
        raise InvalidArgumentError(
            "log_level",
            f"{_LEVEL_VARIABLE} must be DEBUG, INFO, WARNING, ERROR or CRITICAL, got {name!r}",
        )
    return name.upper()


def _uncaught(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    log.critical("an exception ended the process", exc_info=(kind, error, trace))


def _uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
        name = args.thread.name if args.thread is not None else "unknown"
        log.critical("an exception ended the thread %s", name, exc_info=args.exc_value)


def child_lines_to_stderr(line: str) -> None:
    """A supervisor's sink for children that log JSON: forwards JSON lines and wraps all others."""
    match = _CHILD_LINE.fullmatch(line)
    role, text = match.groups() if match else ("", line)
    fields = _log_line(text)
    if fields is None:
        text = json.dumps(_head(datetime.now(UTC).timestamp(), "INFO", role, "stderr", text))
    elif role and fields.get("role") != role:
        # Only the parent knows which of several drafts this is.
        text = json.dumps(fields | {"role": role})
    with contextlib.suppress(OSError, ValueError):  # stderr may be closed before the children end
        # One write per line, because several threads write, and `print` writes the line end separately.
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


def _log_line(text: str) -> dict[str, Any] | None:
    """The fields of a line of JsonFormatter; None for any other line."""
    if not text.startswith('{"time": '):
        return None
    try:
        fields = json.loads(text)
    except ValueError:
        return None
    return fields if isinstance(fields, dict) else None
