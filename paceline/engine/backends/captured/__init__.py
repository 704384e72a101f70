"""Passes recorded once as CUDA graphs and replayed: a step then costs the host one launch."""

from paceline.engine.backends.captured.backend import PATIENCE, CapturedBackend, room_for_logits
from paceline.engine.backends.captured.buckets import ROWS
from paceline.engine.backends.captured.recording import CudaGraphs, Recorder

__all__ = ["PATIENCE", "ROWS", "CapturedBackend", "CudaGraphs", "Recorder", "room_for_logits"]
