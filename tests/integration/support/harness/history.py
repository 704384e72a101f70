"""What a client received, message by message, and whether a correct server could have sent it.

    started  →  chunk(index 0) → chunk → …  →  finished, end of the stream
                                            ↘  one error, which says what the client already has

Recorded from the raw stub, so that nothing the SDK checks or hides stands between server and rules.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from harness.waiting import HANG
from paceline.client.requests import generate_request
from paceline.core.errors import PacelineError, UnavailableError
from paceline.rpc.codec.status import from_rpc_error
from paceline.v1 import generation_pb2 as pb
from paceline.v1 import generation_pb2_grpc


class HistoryError(AssertionError):
    """A rule that a client may rely on is broken."""


@dataclass
class History:
    """Messages in order of arrival, then how the stream ended."""

    messages: list[pb.GenerateResponse] = field(default_factory=list)
    ended: bool = False
    """The stream ended by itself, with status OK."""
    error: PacelineError | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All tokens that came, in order of arrival."""
        return tuple(t for m in self.messages if m.HasField("chunk") for t in m.chunk.token_ids)

    @property
    def text(self) -> str:
        """All text that came."""
        return "".join(m.chunk.text + m.finished.text for m in self.messages)

    @property
    def finished(self) -> pb.GenerateFinished:
        """The last message of a good history."""
        return self.messages[-1].finished


def _require(condition: bool, rule: str) -> None:
    if not condition:
        raise HistoryError(rule)


def validate(history: History, expected: Sequence[int] | None = None, *, complete: bool = True) -> None:
    """Raise HistoryError naming the broken rule.

    Args:
        history: what was seen.
        expected: the tokens of the run without faults.
        complete: the request must have succeeded.
    """
    kinds = [message.WhichOneof("part") for message in history.messages]
    _require(None not in kinds, "a message without a part")
    if kinds:
        _require(kinds[0] == "started", "begins without `started`")
    _require(kinds.count("started") <= 1, "started twice")
    due = 0
    for message in history.messages:
        if not message.HasField("chunk"):
            continue
        chunk = message.chunk
        _require(chunk.index >= due, f"index {chunk.index} came again, {due} was due")
        _require(chunk.index <= due, f"a gap: index {chunk.index} came, {due} was due")
        _require(len(chunk.token_ids) > 0, "a chunk without tokens")
        _require(len(chunk.origins) == len(chunk.token_ids), "not one origin a token")
        due += len(chunk.token_ids)
    _check_end(history, kinds, due)
    if expected is not None:
        got = history.token_ids
        want = tuple(expected)[: None if history.error is None else len(got)]
        _require(got == want, f"other tokens than without faults: {got} / {want}")
    if complete and history.error is not None:
        raise HistoryError(f"the request failed: {history.error!r}")


def _check_end(history: History, kinds: Sequence[str | None], received: int) -> None:
    ends = kinds.count("finished")
    _require(ends <= 1, "finished twice")
    if ends:
        _require(kinds[-1] == "finished", "goes on after `finished`")
        _require(history.error is None, "finished, and failed as well")
        _require(history.ended, "finished, but the stream never ended")
        claimed = history.finished.usage.completion_tokens
        _require(claimed == received, f"{received} tokens came, {claimed} are claimed")
        return
    _require(history.error is not None, "never terminated")
    if isinstance(history.error, UnavailableError):
        last = received - 1 if received else None
        _require(
            history.error.last_index == last, f"the error names index {history.error.last_index}, not {last}"
        )


class Recording:
    """A request in a thread of its own, recorded while it runs."""

    def __init__(self, address: str, prompt: Any, sampling: Any, speculation: Any = None) -> None:
        self.history = History()
        self._changed = threading.Condition()
        self._over = False
        self._channel = grpc.insecure_channel(address)
        request = generate_request(prompt, sampling, speculation, None)
        self._call = generation_pb2_grpc.GenerationServiceStub(self._channel).Generate(request, timeout=HANG)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        history = self.history
        try:
            for message in self._call:
                with self._changed:
                    history.messages.append(message)
                    self._changed.notify_all()
            history.ended = True
        except grpc.RpcError as error:
            history.error = from_rpc_error(error)
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def over(self) -> bool:
        """True when nothing more will come."""
        return self._over

    def wait_for_tokens(self, count: int) -> None:
        """Until that many tokens are there. Fails if the stream ends before."""
        with self._changed:
            self._changed.wait_for(lambda: self._over or len(self.history.token_ids) >= count, HANG)
            assert len(self.history.token_ids) >= count, f"ended or hung early: {self.history}"

    def result(self) -> History:
        """The whole history, at the end."""
        with self._changed:
            assert self._changed.wait_for(lambda: self._over, HANG), "the stream does not end"
        self._thread.join(HANG)
        self._channel.close()
        return self.history
