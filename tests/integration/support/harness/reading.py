"""Streams of the SDK read in separate threads."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

from harness.waiting import HANG
from paceline.client import Client, GenerationChunk, GenerationResult


class Reading:
    """One stream, from its first chunk to its end."""

    def __init__(self, client: Client, prompt: str, sampling: Mapping[str, Any], **speculation: Any) -> None:
        self.chunks: list[GenerationChunk] = []
        speculation = {"num_speculative_tokens": 4, **speculation}
        self._stream = client.stream(prompt, dict(sampling), speculation=speculation, timeout=HANG)
        self._changed = threading.Condition()
        self._over = False
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            for chunk in self._stream:
                with self._changed:
                    self.chunks.append(chunk)
                    self._changed.notify_all()
        except BaseException as error:
            self._error = error
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """True when nothing more will come."""
        return self._over

    @property
    def num_resumes(self) -> int:
        """How often it was asked for again."""
        return self._stream.num_resumes

    def wait_for_tokens(self, count: int) -> None:
        """Until that many are there. Fails if the stream ends before."""

        def enough() -> bool:
            return sum(len(chunk.token_ids) for chunk in self.chunks) >= count

        with self._changed:
            self._changed.wait_for(lambda: self._over or enough(), HANG)
            assert enough(), f"ended or hung early: {self._error!r}"

    def result(self) -> GenerationResult:
        """The whole. Raises what ended the stream."""
        self._thread.join(HANG)
        assert not self._thread.is_alive(), "the stream does not end"
        if self._error is not None:
            raise self._error
        assert self._stream.result is not None
        return self._stream.result
