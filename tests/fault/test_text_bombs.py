"""Texts at the bounds of any model: a coordinator's memory and processor time for one of them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from harness.tiers import mostly_full
from harness.waiting import HANG

from tests.fault.bombs.texts import TEXTS, text_of

MAX_MEMORY = 900 * 1024 * 1024
"""Above what the process has before, whatever the model."""
MAX_SECONDS = 60.0
"""Of processor time, on any machine: a text that was not counted took as much for a third of the bytes."""

PROGRAM = """
import asyncio, json, sys, time
from pathlib import Path
from coordinator.text.long_texts import LongTexts
from coordinator.text.vocabulary import Vocabulary
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError

def most():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024

async def main():
    texts = LongTexts(Vocabulary.load("embedded:target"))
    unit = json.loads(sys.stdin.read())
    text = unit * (limits.MAX_PROMPT_BYTES // len(unit.encode()))
    before, begun = most(), time.process_time()
    try:
        count = len(await texts.encode("text", text, limits.MAX_PROMPT_TOKENS))
    except InvalidArgumentError as error:
        count = str(error)
    print(json.dumps([count, most() - before, time.process_time() - begun]))

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="memory is read from /proc")
@pytest.mark.parametrize("name", mostly_full(TEXTS, count=5))
def test_the_longest_text_takes_bounded_memory(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=json.dumps(text_of(name, len(TEXTS[name]))),
        capture_output=True,
        text=True,
        timeout=HANG,
        check=True,
    )
    count, memory, seconds = json.loads(run.stdout)
    assert isinstance(count, int) or "at most 1048576 tokens" in count
    assert memory < MAX_MEMORY
    assert seconds < MAX_SECONDS
