"""Log lines: their fields, and what they withhold."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import shlex
import sys
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

import pytest
from harness.refusals import refused

from paceline.core.errors import InternalError, InvalidArgumentError
from paceline.supervisor import log_to_stderr
from paceline.telemetry import logs

SECRET = "the prompt"


def logging_to(form: str = "text", role: str = "draft", **more: Any) -> io.StringIO:
    """What is logged from now on."""
    stream = io.StringIO()
    logs.configure_logging(role, form, stream, **more)
    return stream


@pytest.fixture(params=["text", "json"])
def written(request: pytest.FixtureRequest) -> io.StringIO:
    return logging_to(request.param)


@pytest.fixture
def lines() -> Any:
    stream = logging_to("json", "target")
    return lambda: [json.loads(line) for line in stream.getvalue().splitlines()]


def say(message: str = "said", **fields: Any) -> None:
    logging.getLogger("a").info(message, extra=logs.fields(**fields))


@pytest.mark.parametrize("name", ["DEBUG", "warning", "Error"])
def test_the_environment_sets_the_level(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", name)
    logging_to()
    assert logging.getLevelName(logging.getLogger().level) == name.upper()


@pytest.mark.parametrize("name", ["verbose", "", "10", "of a library"])
def test_an_invalid_level_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(logging._nameToLevel, "OF A LIBRARY", 5)
    monkeypatch.setenv("PACELINE_LOG_LEVEL", name)
    with refused("log_level", f"PACELINE_LOG_LEVEL must be .*got '{name}'"):
        logging_to()


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
    stream = logging_to()
    say("call ended", code="OK", took_s=0.123456789, finish_reason=["stop", "length"])
    ended = " draft INFO a: call ended code=OK took_s=0.123457 finish_reason=stop,length\n"
    assert stream.getvalue().endswith(ended)


def test_a_line_end_in_a_field_begins_no_line() -> None:
    stream = logging_to()
    say(request_id="x\n2026 forged")
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
    stream = logging_to()
    say(request_id=value)
    assert stream.getvalue().endswith(f" a: said request_id={written}\n")


def test_quoted_values_can_be_parsed() -> None:
    """A logfmt parser, here one of shell words, finds the field and no other."""
    stream = logging_to()
    sent = 'x code=200 tenant="alice" y'
    say(request_id=sent, code="5")
    words = shlex.split(stream.getvalue().partition(" said ")[2])
    assert words == [f"request_id={sent}", "code=5"]


def test_line_ends_in_a_message_begin_no_log_line() -> None:
    stream = logging_to()
    log_raised(InvalidArgumentError("x", "is\n2026-01-01 INFO forged"), "said\n2026-01-01 INFO forged")
    assert not [line for line in stream.getvalue().splitlines() if line.startswith("2026-01-01")]


@pytest.mark.parametrize(("named", "shown"), [(False, True), (True, False)])
def test_the_role_is_left_out_if_the_parent_writes_it(named: bool, shown: bool) -> None:
    stream = logging_to(named_by_parent=named)
    say()
    assert (" draft INFO" in stream.getvalue()) is shown
    assert stream.getvalue().endswith("INFO a: said\n")


def test_json_lines_always_have_the_role() -> None:
    stream = logging_to("json", named_by_parent=True)
    say()
    assert json.loads(stream.getvalue())["role"] == "draft"


def test_a_calls_context_is_on_its_own_lines_only(lines: Any) -> None:
    async def call(name: str) -> None:
        logs.context.set({"request_id": name})
        await asyncio.sleep(0)
        say()

    async def both() -> None:
        await asyncio.gather(call("one"), call("two"))
        say()

    asyncio.run(both())
    assert [line.get("request_id") for line in lines()] == ["one", "two", None]


def test_fields_attached_by_libraries_are_dropped(written: io.StringIO) -> None:
    logging.getLogger("uvicorn").warning("said", extra={"color_message": SECRET})
    assert SECRET not in written.getvalue()
    assert "said" in written.getvalue()


def raising(error: BaseException) -> None:
    raise error


def log_raised(
    error: BaseException, message: str = "it failed", *, cause: BaseException | None = None
) -> None:
    """An error is caught and logged; with a cause, that was raised first."""
    try:
        try:
            raising(cause or error)
        except BaseException as found:
            if cause is not None:
                raise error from found
            raise
    except BaseException:
        logging.getLogger("a").exception(message)


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
    log_raised(error)
    log_raised(InternalError("ours"), cause=error)
    text = written.getvalue()
    assert SECRET not in text
    assert text.count(type(error).__name__) == 2
    assert "in raising" in text
    assert "InternalError: ours" in text


def test_each_exception_of_a_group_is_logged(written: io.StringIO) -> None:
    log_raised(ExceptionGroup(SECRET, [ValueError(SECRET), InternalError("ours")]))
    text = written.getvalue()
    assert SECRET not in text
    assert "ValueError" in text
    assert "InternalError: ours" in text


@pytest.mark.parametrize("error", [InternalError("known"), OSError("known"), RuntimeError("known")])
def test_harmless_exception_texts_are_logged(error: Exception, written: io.StringIO) -> None:
    log_raised(error)
    assert "Error: known" in written.getvalue()


def test_asyncio_does_not_log_a_forgotten_tasks_exception(written: io.StringIO) -> None:
    message = "Task exception was never retrieved"

    async def fail() -> None:
        raise ValueError(SECRET)

    async def forget() -> None:
        loop = asyncio.get_running_loop()
        task = loop.create_task(fail())
        await asyncio.wait([task])
        loop.call_exception_handler({"message": message, "exception": task.exception(), "future": task})

    asyncio.run(forget())
    assert message in written.getvalue()
    assert SECRET not in written.getvalue()


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


def test_a_childs_json_lines_pass_with_its_name(capsys: pytest.CaptureFixture[str]) -> None:
    line = '{"time": "2026-01-01T00:00:00+00:00", "role": "draft", "message": "said"}'
    for child in ("draft", "draft-2"):
        logs.child_lines_to_stderr(f"[{child}] {line}")
        assert capsys.readouterr().err == line.replace('"draft"', f'"{child}"') + "\n"
