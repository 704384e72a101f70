"""The process that compiles structures: limits, abandoned checks, and its end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from paceline.core import limits
from paceline.core.errors import UnavailableError
from paceline.core.structured import StructuredOutputs
from paceline.grammar import process as process_module
from paceline.grammar.process import CompileProcess, StructureVocabulary
from tests.unit.grammar.tiny import END, TOKENS, VOCAB, tokenizer_json

pytestmark = pytest.mark.slow

MODEL = StructureVocabulary(VOCAB, (END,))
GOOD = StructuredOutputs(regex="[ab]+")
ENDLESS = StructuredOutputs(grammar="start: A\nA: " + " & ".join(f"/(..{{{n}}})*/" for n in range(2, 18)))
"""Some minutes and gigabytes."""


@pytest.fixture
async def process() -> AsyncIterator[CompileProcess]:
    made = CompileProcess(tokenizer_json)
    yield made
    made.close()


def forks(pid: int | None) -> list[int]:
    """Processes that have this one as their parent."""
    found = []
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == pid and fields[0] != "Z":
            found.append(int(status.parent.name))
    return found


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - of other processes
            await asyncio.sleep(0.005)


def with_limits(monkeypatch: pytest.MonkeyPatch, **changes: int) -> None:
    """Child processes that are started from now on have these."""
    code = "from paceline.core import limits\n"
    code += "".join(f"limits.{name} = {value}\n" for name, value in changes.items())
    code += "from paceline.grammar.child import main\nmain()"
    monkeypatch.setattr(process_module, "_PROGRAM", (sys.executable, "-P", "-c", code))


async def test_the_process_reports_what_is_wrong(process: CompileProcess) -> None:
    assert process.pid is None, "it is not started before it is needed"
    assert (await process.check(MODEL, GOOD))["kept"]
    answer = await process.check(MODEL, StructuredOutputs(regex="("))
    assert answer["field"] == "structured_outputs.regex"
    assert "regex parse error" in answer["reason"]
    assert (await process.check(StructureVocabulary(VOCAB, ()), GOOD))["field"] == "structured_outputs"


async def test_the_process_follows_texts(process: CompileProcess) -> None:
    a, one = TOKENS.index("a"), TOKENS.index("1")
    assert (await process.follow(MODEL, GOOD, [[a, a], [], [a]]))["kept"] is True
    assert (await process.follow(MODEL, GOOD, [[a], [a, one]]))["kept"] is False


async def test_processor_time_is_bounded(process: CompileProcess) -> None:
    assert (await process.check(MODEL, ENDLESS))["over"] == "time"
    pid = process.pid
    assert (await process.check(MODEL, GOOD))["kept"]
    assert process.pid == pid, "the tokenizer must not be loaded again for it"


async def test_memory_is_bounded(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(monkeypatch, MAX_STRUCTURE_BYTES=32 << 20, MAX_STRUCTURE_SECONDS=600)
    assert (await process.check(MODEL, ENDLESS))["over"] == "memory"
    assert (await process.check(MODEL, GOOD))["kept"]


async def test_following_a_text_has_its_own_limit(
    process: CompileProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_limits(monkeypatch, MAX_FOLLOW_SECONDS=0)
    assert (await process.follow(MODEL, ENDLESS, [[1]]))["over"] == "time"


async def test_an_abandoned_check_ends_at_once(
    process: CompileProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_limits(monkeypatch, MAX_STRUCTURE_SECONDS=600)
    asked = asyncio.create_task(process.check(MODEL, ENDLESS))
    await until(lambda: forks(process.pid))
    pid, (fork,) = process.pid, forks(process.pid)
    asked.cancel()
    await asyncio.wait((asked,))
    assert (await process.check(MODEL, GOOD))["kept"]
    assert fork not in forks(pid)
    assert process.pid == pid


async def test_a_check_abandoned_during_start_leaves_it_usable(process: CompileProcess) -> None:
    for _ in range(3):
        asked = asyncio.create_task(process.check(MODEL, GOOD))
        await asyncio.sleep(0)
        asked.cancel()
        await asyncio.wait((asked,))
    assert (await process.check(MODEL, GOOD))["kept"]


async def test_closing_ends_a_running_compilation(
    process: CompileProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_limits(monkeypatch, MAX_STRUCTURE_SECONDS=600)
    asked = asyncio.create_task(process.check(MODEL, ENDLESS))
    await until(lambda: forks(process.pid))
    ended = [process.pid, *forks(process.pid)]
    process.close()
    await until(lambda: not any(Path(f"/proc/{pid}/exe").exists() for pid in ended))
    with pytest.raises(UnavailableError):
        await asked
    with pytest.raises(UnavailableError):
        await process.check(MODEL, GOOD)


async def test_a_killed_process_is_replaced(process: CompileProcess) -> None:
    await process.check(MODEL, GOOD)
    pid = process.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    assert (await process.check(MODEL, GOOD))["kept"]
    assert process.pid != pid


async def test_a_killed_fork_is_reported(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(monkeypatch, MAX_STRUCTURE_SECONDS=600)
    asked = asyncio.create_task(process.check(MODEL, ENDLESS))
    await until(lambda: forks(process.pid))
    os.kill(forks(process.pid)[0], signal.SIGKILL)
    assert (await asked)["killed"]


async def test_a_process_that_cannot_start_is_an_error(
    process: CompileProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "_PROGRAM", (sys.executable, "-c", "raise SystemExit(3)"))
    with pytest.raises(UnavailableError):
        await process.check(MODEL, GOOD)


async def test_the_process_has_one_thread_and_low_priority(process: CompileProcess) -> None:
    """A fork of a threaded process may wait for a lock that is never released."""
    await process.check(MODEL, GOOD)
    status = Path(f"/proc/{process.pid}")
    assert len(list((status / "task").iterdir())) == 1
    assert int((status / "stat").read_text().rpartition(")")[2].split()[16]) > 0
    assert (status / "oom_score_adj").read_text().strip() == "1000"


def test_the_process_ends_with_its_server() -> None:
    """Killed while a structure is compiled, without a chance to say so."""
    code = f"""
import asyncio, json
from paceline.grammar.process import CompileProcess, StructureVocabulary
from paceline.core.structured import StructuredOutputs
async def main():
    process = CompileProcess(lambda: {tokenizer_json()!r})
    vocabulary = StructureVocabulary({VOCAB}, ({END},))
    await process.check(vocabulary, StructuredOutputs(regex="a"))
    print(process.pid, flush=True)
    await process.check(vocabulary, StructuredOutputs(grammar={ENDLESS.grammar!r}))
    await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as server:
        pid = json.loads(server.stdout.readline())
        ending = os.pidfd_open(pid)
        server.kill()

        async def ended() -> None:
            await until(lambda: not Path(f"/proc/{pid}/exe").exists())

        os.close(ending)
        asyncio.run(ended())


async def test_the_process_gets_no_settings(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some are secrets, and structures come from clients."""
    monkeypatch.setenv("PACELINE_API_KEY", "secret")
    await process.check(MODEL, GOOD)
    environment = Path(f"/proc/{process.pid}/environ").read_bytes()  # noqa: ASYNC240 - no disk
    assert b"PACELINE_" not in environment


async def test_a_fork_has_system_limits(process: CompileProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with_limits(monkeypatch, MAX_STRUCTURE_SECONDS=600)
    asked = asyncio.create_task(process.check(MODEL, ENDLESS))
    await until(lambda: [fork for fork in forks(process.pid) if is_limited(fork)])
    asked.cancel()
    await asyncio.wait((asked,))


def is_limited(pid: int) -> bool:
    """Its memory has no more than the limit beside what its parent had."""
    try:
        limits_of, size = (Path(f"/proc/{pid}/{name}").read_text() for name in ("limits", "statm"))
    except OSError:
        return False
    words = next(line for line in limits_of.splitlines() if line.startswith("Max address space")).split()
    if words[3] == "unlimited":
        return False
    return int(words[3]) <= int(size.split()[0]) * os.sysconf("SC_PAGE_SIZE") + limits.MAX_STRUCTURE_BYTES
