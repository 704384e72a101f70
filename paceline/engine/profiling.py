"""Profiles of the engine thread by torch.profiler.

The profiler sees the operations of the thread that starts and stops it, which must be the same one, and all
kernels of the process on a CUDA device. Stopping gathers its events, about 25 microseconds each, and holds up
the thread for that long.
"""

from __future__ import annotations

import contextlib
import gzip
import shutil
import tempfile
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from paceline.core import limits
from paceline.core.errors import ResourceExhaustedError

_QUICK: Final = 1
"""gzip's level: a higher one takes many times longer for a few percent."""


class EngineProfile:
    """One profile: started and stopped on the engine thread, saved on any other."""

    def __init__(self) -> None:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities)

    def start(self) -> None:
        """Begin. Raises RuntimeError if another profiler runs in this process."""
        self._profile.start()

    @staticmethod
    def step() -> contextlib.AbstractContextManager[object]:
        """A range around one step, which the trace shows as `step`."""
        return record_function("step")

    def stop(self) -> None:
        """Gather what was recorded."""
        self._profile.stop()

    def save(self) -> bytes:
        """The gzipped Chrome trace. Raises ResourceExhaustedError if it is larger than a profile may be."""
        with tempfile.TemporaryDirectory() as folder:
            plain, packed = Path(folder) / "trace.json", Path(folder) / "trace.json.gz"
            self._profile.export_chrome_trace(str(plain))
            with plain.open("rb") as source, gzip.open(packed, "wb", compresslevel=_QUICK) as target:
                shutil.copyfileobj(source, target)
            size, most = packed.stat().st_size, limits.MAX_PROFILE_BYTES
            if size > most:
                raise ResourceExhaustedError(
                    f"the profile takes {size:,} bytes, and {most:,} may be sent: ask for fewer seconds"
                )
            return packed.read_bytes()
