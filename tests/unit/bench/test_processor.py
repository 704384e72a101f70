"""Processor time of other processes, and of this one."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from paceline.bench.processor import PROCESSES, Processors

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no clock for another process")

BUSY = """
import time
while time.process_time() < 0.3: pass
print("done", flush=True)
input()
"""


@pytest.fixture
def busy() -> Iterator[subprocess.Popen[bytes]]:
    """A process that has computed for 0.3 s and then waits."""
    with subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as own:
        assert own.stdout is not None
        assert own.stdout.readline() == b"done\n"
        yield own
        own.kill()


def test_each_role_has_the_time_of_its_processes(busy: subprocess.Popen[bytes]) -> None:
    here = time.process_time()
    found = Processors({"target": [busy.pid, busy.pid], "draft": [busy.pid], "coordinator": []}).seconds()
    assert set(found) == set(PROCESSES)
    assert 0.3 <= found["draft"] < 30
    assert found["target"] == pytest.approx(2 * found["draft"], rel=0.2)
    assert found["coordinator"] == 0
    assert here <= found["client"] <= time.process_time()


def test_a_process_that_is_gone_makes_them_all_unknown(busy: subprocess.Popen[bytes]) -> None:
    clocks = Processors({"target": [busy.pid]})
    assert clocks.seconds()
    busy.kill()
    busy.wait()
    assert clocks.seconds() == {}
