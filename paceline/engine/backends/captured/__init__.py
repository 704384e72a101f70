"""Passes recorded once as CUDA graphs and replayed: a step then costs the host one launch."""

from paceline.engine.backends.captured.backend import (
    MAX_RECORDED,
    PATIENCE,
    CapturedBackend,
    room_for_logits,
)
from paceline.engine.backends.captured.buckets import ROWS
from paceline.engine.backends.captured.largest import largest_steps
from paceline.engine.backends.captured.recording import CudaGraphs, Recorder

__all__ = [
    "MAX_RECORDED",
    "PATIENCE",
    "ROWS",
    "CapturedBackend",
    "CudaGraphs",
    "Recorder",
    "largest_steps",
    "room_for_logits",
]
