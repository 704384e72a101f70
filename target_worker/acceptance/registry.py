"""The acceptance rule of each mode."""

from __future__ import annotations

from paceline.core.types import AcceptanceMode
from target_worker.acceptance.block import BLOCK
from target_worker.acceptance.coupled import COUPLED
from target_worker.acceptance.interface import AcceptanceRule
from target_worker.acceptance.rejection import REJECTION

RULES: dict[AcceptanceMode, AcceptanceRule] = {
    AcceptanceMode.COUPLED: COUPLED,
    AcceptanceMode.REJECTION: REJECTION,
    AcceptanceMode.BLOCK: BLOCK,
}
