"""The answer to one Generate call, folded from its messages. No I/O, so both clients share it.

    started  →  chunk*  →  finished  →  end of the stream

Whatever breaks that order, skips an index or names something unknown is an InternalError: the server is
wrong or too new, and tokens must not be lost or repeated in silence.
"""

from __future__ import annotations

from typing import Literal, NoReturn

from paceline.client.results import (
    GenerationChunk,
    GenerationResult,
    RoundTimings,
    SpeculativeDecoding,
    Usage,
)
from paceline.client.server_status import mirror
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError, UnavailableError
from paceline.core.types import AcceptanceMode, FinishReason, TokenOrigin
from paceline.rpc import codec
from paceline.v1 import generation_pb2


def _broken(what: str) -> NoReturn:
    raise InternalError(f"the server's answer breaks the protocol: {what}")


class StreamAssembler:
    """Feed it each message; it gives chunks, and in the end `result`."""

    def __init__(self) -> None:
        self.result: GenerationResult | None = None
        self._started: generation_pb2.GenerateStarted | None = None
        self._mode = AcceptanceMode.COUPLED
        self._token_ids: list[int] = []
        self._origins: list[TokenOrigin] = []
        self._texts: list[str] = []

    @property
    def request_id(self) -> str | None:
        """As the server confirmed or chose it; None before its first message."""
        return None if self._started is None else self._started.request_id

    @property
    def last_index(self) -> int | None:
        """Index of the last token that arrived, None before the first."""
        return len(self._token_ids) - 1 if self._token_ids else None

    def feed(self, message: generation_pb2.GenerateResponse | None) -> GenerationChunk | None:
        """The chunk this message brings, if it brings one; None is the end of the stream.

        Raises InternalError, and UnavailableError for an end that came too early.
        """
        if message is None:
            self.require_result()
            return None
        if self.result is not None:
            _broken("it goes on after its end")
        part = message.WhichOneof("part")
        if (part == "started") != (self._started is None):
            _broken("it must start once, with `started`")
        try:
            match part:
                case "started":
                    self._start(message.started)
                    return None
                case "chunk":
                    return self._extend(message.chunk)
                case "finished":
                    return self._finish(message.finished)
        except InvalidArgumentError as error:
            # The codec's word for a number that this version does not know.
            _broken(error.message)
        _broken("it holds a part this version does not know")

    def _start(self, started: generation_pb2.GenerateStarted) -> None:
        self._mode = codec.mode_from_proto(started.acceptance_mode)
        self._started = started

    def _extend(self, message: generation_pb2.GenerateChunk) -> GenerationChunk:
        if message.index != len(self._token_ids):
            _broken(f"index {message.index} came where {len(self._token_ids)} was due")
        if len(message.origins) != len(message.token_ids):
            _broken("it needs one origin a token")
        chunk = GenerationChunk(
            index=message.index,
            token_ids=tuple(message.token_ids),
            text=message.text,
            origins=tuple(codec.origin_from_proto(origin) for origin in message.origins),
        )
        self._token_ids.extend(chunk.token_ids)
        self._origins.extend(chunk.origins)
        self._texts.append(chunk.text)
        return chunk

    def _finish(self, finished: generation_pb2.GenerateFinished) -> GenerationChunk:
        assert self._started is not None
        if finished.usage.completion_tokens != len(self._token_ids):
            _broken(f"{len(self._token_ids)} tokens of {finished.usage.completion_tokens} came")
        stop = codec.finish_reason_from_proto(finished.finish_reason) is FinishReason.STOP
        reason: Literal["stop", "length"] = "stop" if stop else "length"
        self._texts.append(finished.text)
        self.result = GenerationResult(
            request_id=self._started.request_id,
            seed=self._started.seed,
            acceptance=self._mode,
            text="".join(self._texts),
            token_ids=tuple(self._token_ids),
            origins=tuple(self._origins),
            finish_reason=reason,
            stop_reason=_stop_reason(finished),
            usage=mirror(Usage, finished.usage),
            speculative_decoding=mirror(SpeculativeDecoding, finished.speculative_decoding),
            timings=_timings(finished.timings),
        )
        return GenerationChunk(
            index=len(self._token_ids),
            token_ids=(),
            text=finished.text,
            origins=(),
            finish_reason=reason,
            result=self.result,
        )

    def require_result(self) -> GenerationResult:
        """The result at the end of the stream. Raises UnavailableError if it ended too early."""
        if self.result is None:
            raise UnavailableError("the stream ended before the generation did", self.last_index)
        return self.result

    def fail(self, error: PacelineError) -> None:
        """Raise what ended the stream, saying what the client already has where it does not.

        Returns if the result is complete: nothing that comes after it can change it.
        """
        if self.result is not None:
            return
        if isinstance(error, UnavailableError) and error.last_index is None:
            error.last_index = self.last_index
        raise error


def _stop_reason(finished: generation_pb2.GenerateFinished) -> str | int | None:
    match finished.WhichOneof("stop_reason"):
        case "stop_string":
            return finished.stop_string
        case "stop_token_id":
            return finished.stop_token_id
    return None


def _timings(message: generation_pb2.RoundTimings) -> RoundTimings:
    return RoundTimings(
        draft=message.draft_us / 1e6,
        target=message.target_us / 1e6,
        queue=message.queue_us / 1e6,
        wire=message.wire_us / 1e6,
        coordinator=message.coordinator_us / 1e6,
        total=message.total_us / 1e6,
    )
