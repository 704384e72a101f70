"""Streams that a fault hits in the middle, the tokens they have without it, and a process's memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.history import Recording
from harness.oracle import Ids
from harness.stacks import OwnCoordinator, RunningStack
from harness.waiting import HANG

GREEDY: Mapping[str, Any] = {"temperature": 0.0}
COUPLED: Mapping[str, Any] = {"temperature": 1.0, "top_p": 0.95, "seed": 77}
PENALISED: Mapping[str, Any] = {
    "temperature": 0.8,
    "seed": 78,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.3,
}
ITEMS = 18
STRUCTURED: Mapping[str, Any] = {
    "temperature": 1.0,
    "seed": 41,
    "max_tokens": 900,
    "ignore_eos": False,
    "structured_outputs": {
        "json": {
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
            "minItems": ITEMS,
            "maxItems": ITEMS,
        },
        "disable_any_whitespace": True,
    },
}
"""A worker that takes it over has the grammar's state from the ledger alone."""
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED, "penalised": PENALISED, "structured": STRUCTURED}
LENGTH = 200
"""Long enough that a fault hits it in the middle."""
DRAFT_TIMEOUT = 2.0
"""Seconds: more than a busy machine keeps a sound draft from answering."""


def record(
    stack: RunningStack | OwnCoordinator,
    prompt: Ids,
    sampling: Mapping[str, Any],
    k: int = 4,
    length: int = LENGTH,
) -> Recording:
    parameters = {"max_tokens": length, "ignore_eos": True, **sampling}
    # Nothing is copied from the text: what is drafted is the draft worker's.
    return Recording(stack.address, prompt, parameters, {"num_speculative_tokens": k, "prompt_lookup": False})


def without_fault(stack: RunningStack, prompt: Ids, sampling: Mapping[str, Any], length: int = LENGTH) -> Ids:
    parameters = {"max_tokens": length, "ignore_eos": True, **sampling}
    speculation = {"num_speculative_tokens": 0}
    return stack.client.generate(prompt, parameters, speculation=speculation, timeout=HANG).token_ids


def memory(pid: int, name: str = "VmRSS") -> int:
    """Bytes that a process has; `VmHWM`: the most that it had."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split(f"{name}:")[1].split()[0]) * 1024
