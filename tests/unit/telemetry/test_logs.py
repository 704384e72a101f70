"""Log lines: their fields, and what they withhold."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from typing import Any

import pytest

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.supervisor import log_to_stderr
from paceline.telemetry import logs

SECRET = "the prompt"


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    root = logging.getLogger()
    before = root.handlers[:], root.level, sys.excepthook, threading.excepthook
    yield
    logging.captureWarnings(False)
    for handler in root.handlers[:]:
        root.removeHandler(handler)
    for handler in before[0]:
        root.addHandler(handler)
    root.setLevel(before[1])
    sys.excepthook, threading.excepthook = before[2], before[3]


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> io.StringIO:
    stream = io.StringIO()
    logs.configure_logging("target", request.param, stream)
    return stream


@pytest.fixture
def lines() -> Any:
    stream = io.StringIO()
    logs.configure_logging("target", "json", stream)
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.mark.parametrize("name", ["DEBUG", "warning", "Error"])
def test_the_environment_sets_the_level(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", name)
    logs.configure_logging("target", "text", io.StringIO())
    assert logging.getLevelName(logging.getLogger().level) == name.upper()


@pytest.mark.parametrize("name", ["verbose", "", "10", "of a library"])
def test_an_invalid_level_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logging._nameToLevel, "OF A LIBRARY", 5)
    monkeypatch.setenv("PACELINE_LOG_LEVEL", name)
    with pytest.raises(InvalidArgumentError, match=f"PACELINE_LOG_LEVEL must be .*got '{name}'") as refused:
        logs.configure_logging("target", "text", io.StringIO())
    assert refused.value.field == "log_level"


def test_a_json_line_has_the_standard_fields(lines: Any) -> None:
    logging.getLogger("a.b").warning("%d blocks", 3, extra=logs.fields(sequence_id="s", left_out=None))
    (line,) = lines()
    assert datetime.fromisoformat(line.pop("time")).tzinfo is not None
    assert line == {
        "level": "WARNING",
        "role": "target",
        "logger": "a.b",
        "message": "3 blocks",
        "sequence_id": "s",
    }


def test_a_field_does_not_replace_a_standard_one(lines: Any) -> None:
    logging.getLogger("a").info("said", extra=logs.fields(message="other", role="other"))
    (line,) = lines()
    assert (line["message"], line["role"]) == ("said", "target")


def test_a_text_line_ends_with_its_fields() -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream)
    about = logs.fields(code="OK", took_s=0.123456789, finish_reason=["stop", "length"])
    logging.getLogger("a").info("call ended", extra=about)
    assert stream.getvalue().endswith(
        " draft INFO a: call ended code=OK took_s=0.123457 finish_reason=stop,length\n"
    )


def test_a_line_end_in_a_field_begins_no_line() -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream)
    logging.getLogger("a").info("said", extra=logs.fields(request_id="x\n2026 forged"))
    assert stream.getvalue().count("\n") == 1


@pytest.mark.parametrize(
    ("value", "written"),
    [
        ("cmpl-5f", "cmpl-5f"),
        ("a code=200 tenant=alice", '"a code=200 tenant=alice"'),
        ("a=b", '"a=b"'),
        ('say "x"', r'"say \"x\""'),
        ("it's", '"it\'s"'),
        (r"a\b", r'"a\\b"'),
        ("", '""'),
        ("a\tb\u2028c", r'"a\tb\u2028c"'),
        ("schlüssel", "schlüssel"),
        (["stop", "a b"], '"stop,a b"'),
        (3, "3"),
    ],
)
def test_a_text_value_is_quoted_like_logfmt(value: Any, written: str) -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream)
    logging.getLogger("a").info("said", extra=logs.fields(request_id=value))
    assert stream.getvalue().endswith(f" a: said request_id={written}\n")


def test_quoted_values_can_be_parsed() -> None:
    """A logfmt parser, here one of shell words, finds the field and no other."""
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream)
    sent = 'x code=200 tenant="alice" y'
    logging.getLogger("a").info("said", extra=logs.fields(request_id=sent, code="5"))
    words = shlex.split(stream.getvalue().partition(" said ")[2])
    assert words == [f"request_id={sent}", "code=5"]


def test_line_ends_in_a_message_begin_no_log_line() -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream)
    try:
        raising(InvalidArgumentError("x", "is\n2026-01-01 INFO forged"))
    except InvalidArgumentError:
        logging.getLogger("a").exception("said\n2026-01-01 INFO forged")
    assert not [line for line in stream.getvalue().splitlines() if line.startswith("2026-01-01")]


@pytest.mark.parametrize(("named", "shown"), [(False, True), (True, False)])
def test_the_role_is_left_out_if_the_parent_writes_it(named: bool, shown: bool) -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "text", stream, named_by_parent=named)
    logging.getLogger("a").info("said")
    assert (" draft INFO" in stream.getvalue()) is shown
    assert stream.getvalue().endswith("INFO a: said\n")


def test_json_lines_always_have_the_role() -> None:
    stream = io.StringIO()
    logs.configure_logging("draft", "json", stream, named_by_parent=True)
    logging.getLogger("a").info("said")
    assert json.loads(stream.getvalue())["role"] == "draft"


def test_a_calls_context_is_on_its_own_lines_only(lines: Any) -> None:
    async def call(name: str) -> None:
        logs.context.set({"request_id": name})
        await asyncio.sleep(0)
        logging.getLogger("a").info("said")

    async def both() -> None:
        await asyncio.gather(call("one"), call("two"))
        logging.getLogger("a").info("said")

    asyncio.run(both())
    assert [line.get("request_id") for line in lines()] == ["one", "two", None]


def test_fields_attached_by_libraries_are_dropped(written: io.StringIO) -> None:
    logging.getLogger("uvicorn").warning("said", extra={"color_message": SECRET})
    assert SECRET not in written.getvalue()
    assert "said" in written.getvalue()


def raising(error: BaseException) -> None:
    raise error


def causing(cause: BaseException, error: BaseException) -> None:
    try:
        raising(cause)
    except BaseException as found:
        raise error from found


@pytest.mark.parametrize(
    "error",
    [
        ValueError(SECRET),
        KeyError(SECRET),
        UnicodeEncodeError("utf-8", SECRET, 0, 1, SECRET),
        NotImplementedError(SECRET),
        type("OwnError", (RuntimeError,), {})(SECRET),
    ],
)
def test_an_exceptions_text_is_withheld_and_its_place_logged(
    error: BaseException, written: io.StringIO
) -> None:
    for chained in (lambda: raising(error), lambda: causing(error, InternalError("ours"))):
        try:
            chained()
        except BaseException:
            logging.getLogger("a").exception("it failed")
    text = written.getvalue()
    assert SECRET not in text
    assert text.count(type(error).__name__) == 2
    assert "in raising" in text
    assert "InternalError: ours" in text


def test_each_exception_of_a_group_is_logged(written: io.StringIO) -> None:
    try:
        raising(ExceptionGroup(SECRET, [ValueError(SECRET), InternalError("ours")]))
    except ExceptionGroup:
        logging.getLogger("a").exception("it failed")
    text = written.getvalue()
    assert SECRET not in text
    assert "ValueError" in text
    assert "InternalError: ours" in text


@pytest.mark.parametrize("error", [InternalError("known"), OSError("known"), RuntimeError("known")])
def test_harmless_exception_texts_are_logged(error: Exception, written: io.StringIO) -> None:
    try:
        raising(error)
    except Exception:
        logging.getLogger("a").exception("it failed")
    assert "Error: known" in written.getvalue()


def test_asyncio_does_not_log_a_forgotten_tasks_exception(written: io.StringIO) -> None:
    async def forget() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(_fail())
        await asyncio.wait([task])
        loop.call_exception_handler(
            {"message": "Task exception was never retrieved", "exception": task.exception(), "future": task}
        )

    asyncio.run(forget())
    assert "Task exception was never retrieved" in written.getvalue()
    assert SECRET not in written.getvalue()


async def _fail() -> None:
    raise ValueError(SECRET)


def test_an_uncaught_exception_is_an_ordinary_log_line(written: io.StringIO) -> None:
    def dies() -> None:
        raise ValueError(SECRET)

    thread = threading.Thread(target=dies, name="engine")
    thread.start()
    thread.join()
    try:
        dies()
    except ValueError as error:
        sys.excepthook(ValueError, error, error.__traceback__)
    text = written.getvalue()
    assert SECRET not in text
    assert "an exception ended the thread engine" in text
    assert "an exception ended the process" in text


def test_warnings_are_ordinary_log_lines(written: io.StringIO) -> None:
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old", DeprecationWarning, stacklevel=1)
    assert "py.warnings" in written.getvalue()


@pytest.mark.parametrize(
    ("line", "role", "message"),
    [
        ("[draft] E0000 something of a C library", "draft", "E0000 something of a C library"),
        ('[draft] {"event": "odd"}', "draft", '{"event": "odd"}'),
        ('[draft] {"time": broken', "draft", '{"time": broken'),
        ("no role at all", "", "no role at all"),
    ],
)
def test_a_childs_other_lines_are_wrapped(
    line: str, role: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.child_lines_to_stderr(line)
    told = json.loads(capsys.readouterr().err)
    assert (told["role"], told["message"]) == (role, message)
    assert {"time", "level", "logger"} <= told.keys()


@pytest.mark.parametrize("sink", [logs.child_lines_to_stderr, log_to_stderr])
def test_lines_of_several_children_do_not_mix(
    sink: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces: list[str] = []

    class Stream(io.StringIO):
        def write(self, text: str, /) -> int:
            pieces.append(text)
            return len(text)

    monkeypatch.setattr(sys, "stderr", Stream())
    sink("[draft] said")
    (piece,) = pieces
    assert piece.endswith("\n")


def test_a_childs_json_lines_pass_unchanged(capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"time": "2026-01-01T00:00:00+00:00", "message": "said"}'
    logs.child_lines_to_stderr(f"[draft] {line}")
    assert capsys.readouterr().err == f"{line}\n"
