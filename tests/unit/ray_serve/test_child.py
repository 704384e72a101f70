"""A worker's process under its replica."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from harness.ending import ended

from paceline.ray.child import Child

pytestmark = pytest.mark.slow
READY = json.dumps({"event": "ready", "role": "target", "address": "127.0.0.1:7", "pid": 1})
WAITS = f"""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(3))
print('a line'); print('{READY}', flush=True)
signal.pause()
"""
REFUSES = "import sys; print('error: model: there is none', file=sys.stderr); sys.exit(2)"
IGNORES = f"""
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
print('{READY}', flush=True)
while True: signal.pause()
"""


def child(code: str) -> Child:
    return Child("target", [sys.executable, "-c", code])


def test_a_child_announces_itself_and_drains() -> None:
    it = child(WAITS)
    assert it.wait_for_address() == "127.0.0.1:7"
    assert it.running
    it.stop(60)
    assert not it.running
    assert it.last_words() == "exited with code 3"


def test_a_child_that_ends_first_says_why() -> None:
    with pytest.raises(RuntimeError, match="target worker: model: there is none"):
        child(REFUSES).wait_for_address()


def test_a_child_that_does_not_drain_is_killed() -> None:
    it = child(IGNORES)
    it.wait_for_address()
    it.stop(0.1)
    assert it.last_words().startswith("was killed by SIGKILL")


def test_a_child_ends_with_its_parent(tmp_path: Path) -> None:
    """As `--exit-with-parent` does: its standard input ends, however its parent does."""
    reads = f"import sys; print('{READY}', flush=True); sys.stdin.read()"
    code = f"""
import os, sys
from paceline.ray.child import Child
child = Child("target", [sys.executable, "-c", {reads!r}])
child.wait_for_address()
open({str(tmp_path / "pid")!r}, "w").write(str(child.pid))
os.kill(os.getpid(), 9)
"""
    parent = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", code])
    os.waitpid(parent, 0)
    assert ended(int((tmp_path / "pid").read_text()), 60)
