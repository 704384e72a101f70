"""The checks, in the order in which they run: what may leave the device broken comes last."""

from __future__ import annotations

from typing import Final

from tools.gpu_check.checks import (
    attention,
    chains,
    faults,
    judging,
    machine,
    memory,
    noise,
    rounds,
    sharing,
    steps,
    varlen,
)
from tools.gpu_check.running import Check

CHECKS: Final[tuple[Check, ...]] = (
    machine.CHECK,
    noise.CHECK,
    attention.CHECK,
    varlen.CHECK,
    judging.CHECK,
    steps.SMALL,
    steps.TARGET,
    chains.CHECK,
    rounds.CHECK,
    memory.CHECK,
    sharing.CHECK,
    faults.CHECK,
)
