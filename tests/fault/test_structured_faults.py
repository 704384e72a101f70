"""Workers die under a structured output: the text is unchanged."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest
from harness.history import Recording, validate
from harness.mid_stream import failovers, mid_stream
from harness.oracle import Ids, Oracle
from harness.prompts import SOURCE
from harness.stacks import RunningStack
from harness.waiting import HANG

SCHEMA: dict[str, Any] = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "pattern": "^[a-z]{2,6}$"},
            "n": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "n"],
        "additionalProperties": False,
    },
    "minItems": 18,
    "maxItems": 18,
}
SAMPLING: dict[str, Any] = {
    "max_tokens": 900,
    "temperature": 1.0,
    "seed": 41,
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
}


@pytest.mark.parametrize("role", ["draft", "target"])
def test_a_killed_worker_costs_no_token(faulty: RunningStack, oracle: Oracle, role: str) -> None:
    """The restarted worker derives the grammar state from the ledger."""
    prompt: Ids = oracle.encode(SOURCE)[:40]
    expected = faulty.client.generate(
        prompt, SAMPLING, speculation={"num_speculative_tokens": 0}, timeout=HANG
    )
    assert expected.finish_reason == "stop"
    assert len(json.loads(expected.text)) == 18
    lost = failovers(faulty, role)
    with mid_stream(
        faulty, lambda: [Recording(faulty.address, prompt, SAMPLING, {"num_speculative_tokens": 4})], 60
    ) as (stream,):
        killed = faulty.stack.kill(role, signal.SIGKILL)
    validate(stream.result(), expected.token_ids)
    assert failovers(faulty, role) > lost
    faulty.stack.wait_for_restart(role, after=killed, timeout=HANG)
    faulty.wait_for_worker(role)
    faulty.good_request()
