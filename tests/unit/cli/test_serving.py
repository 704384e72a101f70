"""`paceline serve`: shared options, log lines, announcement and the end of its processes."""

from __future__ import annotations

import re
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from harness.commands import LOADING, python, running

from paceline.cli import main
from paceline.cli.commands.serve import _announce, _checked, _with_models
from paceline.supervisor import StackOptions

pytestmark = pytest.mark.slow


HANG = 30.0
SERVING = """
import signal
from paceline.rpc.server import event_loop
from paceline.rpc.server.server import Server

async def drained():
    pass

async def serve():
    server = Server("test", "127.0.0.1", 0)
    await server.start()
    server.heed_signals(exit_with_parent=False)
    server.announce()
    await server.run_until_stopped(drain=drained)

signal.signal(signal.SIGINT, signal.default_int_handler)
event_loop.run(serve())
print("stopped in order", flush=True)
"""

SUPERVISING = """
import contextlib, logging, sys
from paceline.cli.commands import serve as serving
from paceline.cli import main

@contextlib.contextmanager
def serve_stack(config, sink):
    logger = logging.getLogger("paceline.supervisor.children")
    logger.info("of no interest")
    logger.warning("target died")
    raise KeyboardInterrupt
    yield

serving.serve_stack = serve_stack
main(["serve"])
"""


@pytest.fixture(autouse=True)
def _two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: (0, 1))


def test_shared_options_apply_where_a_worker_has_none() -> None:
    config = _checked(
        StackOptions(draft_device="cuda", target_threads=2), device="cpu", dtype="auto", threads=1
    )
    assert (config.target_device, config.draft_device) == ("cpu", "cuda")
    assert (config.target_threads, config.draft_threads) == (2, 1)


def test_a_process_without_readers_exits_quietly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unwritten output must not end it with BrokenPipeError."""
    module = "paceline.cli.commands.serve"
    leaving = f"import sys; from {module} import _leave; sys.stdin.read(); print('more'); _leave()"
    monkeypatch.setenv("PYTHONUNBUFFERED", "")
    with running(leaving) as process:
        process.stdout.close()
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(HANG) == 0


@pytest.mark.parametrize("role", ["coordinator", "target"])
def test_the_first_ctrl_c_ends_a_loading_process(role: str) -> None:
    """Cancelling asyncio's main task alone is noticed only after loading."""
    with running(LOADING, role, "default_int_handler", "by itself") as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == -signal.SIGINT
        assert "Traceback" not in process.stderr.read()


def test_ctrl_c_stops_a_serving_process_in_order() -> None:
    with running(SERVING) as process:
        assert '"event": "ready"' in process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == 0
        assert process.stdout.read() == "stopped in order\n"


def test_a_process_that_ignores_ctrl_c_goes_on_loading() -> None:
    """As a background job of a shell."""
    with running(LOADING, "coordinator", "SIG_IGN", "by itself") as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(HANG) == -signal.SIGTERM


def test_serve_prints_its_start_line_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PACELINE_LOG_LEVEL", raising=False)
    first, second = python(SUPERVISING).stderr.splitlines()[:2]
    said = r" starting with the target embedded:target and the draft embedded:draft"
    assert re.fullmatch(rf"\d{{4}}-\S+ \S+ supervisor INFO paceline\.steps: Paceline \S+{said}", first), first
    assert second.endswith("of no interest"), "what the stack itself writes first"


def test_supervisor_log_lines_follow_the_log_level() -> None:
    done = python(SUPERVISING, PACELINE_LOG_LEVEL="WARNING")
    assert (done.returncode, done.stdout) == (0, "stopped\n")
    line = r"\d{4}-\d\d-\d\d \S+ supervisor WARNING paceline\.supervisor\.children: target died\n"
    assert re.fullmatch(line, done.stderr), done.stderr


@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("more", [[], ["--exit-with-parent"]])
def test_a_worker_first_reports_loading_libraries(
    role: str, more: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    run = SimpleNamespace(run=lambda _config: said.append(capsys.readouterr().err))
    monkeypatch.setitem(sys.modules, f"{role}_worker.main", run)
    monkeypatch.setattr("paceline.cli.commands.serve._leave", lambda: None)
    monkeypatch.setattr("paceline.cli.commands.serve.configure_logging", lambda *_, **__: None)
    monkeypatch.setattr("paceline.cli.commands.serve.step", lambda text: print(text, file=sys.stderr))
    words = [f"{role}-worker", "--model", f"embedded:{role}", "--port", "0"]
    with pytest.raises(SystemExit):
        main([*words, *more])
    assert ["loading libraries" in text for text in said] == [True]


@pytest.mark.parametrize(
    ("values", "target", "draft"),
    [
        ({}, "embedded:target", "embedded:draft"),
        ({"target_model": "t"}, "t", "none"),
        ({"target_model": "t", "draft_model": "d"}, "t", "d"),
        ({"drafter": "ngram"}, "embedded:target", "embedded:target"),
        ({"target_model": "t", "drafter": "ngram"}, "t", "t"),
        ({"target_model": "t", "draft_model": "d", "drafter": "ngram"}, "t", "d"),
        ({"target_model": "t", "draft_model": "none", "drafter": "ngram"}, "t", "none"),
        ({"target_model": "t", "draft_model": ("d", "e")}, "t", ("d", "e")),
    ],
)
def test_default_models(values: dict[str, Any], target: str, draft: str) -> None:
    """Only a drafter that is a model needs one beside the target."""
    options = _with_models(StackOptions(**{"target_model": "", "draft_model": None} | values), None)
    assert (options.target_model, options.draft_model) == (target, draft)


@pytest.mark.parametrize(
    ("drafter", "named"), [("model", "d"), ("stacked:ngram+random", "stacked:ngram+random")]
)
def test_the_announcement_is_one_write(monkeypatch: pytest.MonkeyPatch, drafter: str, named: str) -> None:
    pieces: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=pieces.append, flush=lambda: None))
    config = SimpleNamespace(
        target_model="t", draft_models=("d",), drafter=drafter, worker_roles=("target", "draft")
    )
    status = SimpleNamespace(http_address="h:2", address="h:1")
    supervisor = SimpleNamespace(status=lambda _role: status)
    stack: Any = SimpleNamespace(
        config=config, supervisor=supervisor, address_of=lambda role: f"{role}:3", coordinator_tls=None
    )
    _announce(stack)
    assert pieces == [
        f"target worker: t at target:3\ndraft worker: {named} at draft:3\n"
        "OpenAI-compatible HTTP at http://h:2/v1\nPaceline listens on h:1\n"
    ]
