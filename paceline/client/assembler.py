"""Assembles the messages of a Generate call into chunks and a result. No I/O, so both clients share it.

    started  →  (chunk*  →  finished) for each choice, interleaved  →  end of the stream

A broken stream may be followed by another one, which begins with `started` again and continues after the
received tokens. It repeats the prompt's data only for choices without tokens; data received before is
dropped, as is the repeated end of a finished choice.

A server behind a proxy may have to send a message before the proxy passes on its error. An empty message is
therefore accepted as the last one of a call that fails.

A message out of order, a skipped index or an unknown value raises InternalError: the server is wrong or too
new, and tokens must not be lost or repeated silently.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Literal, NoReturn

from paceline.client.results import (
    CompletionOutput,
    GenerationChunk,
    GenerationResult,
    Logprob,
    PositionLogprobs,
    RoundTimings,
    SourceCounts,
    SpeculativeDecoding,
    Usage,
)
from paceline.client.server_status import mirror
from paceline.core.errors import InternalError, InvalidArgumentError, PacelineError, UnavailableError
from paceline.core.types import AcceptanceMode, FinishReason, TokenOrigin
from paceline.rpc import codec
from paceline.v1 import common_pb2, generation_pb2


def is_empty(message: generation_pb2.GenerateResponse) -> bool:
    """True for a message without content, not even of a newer version."""
    return message.ByteSize() == 0


def _broken(what: str) -> NoReturn:
    raise InternalError(f"the server's answer breaks the protocol: {what}")


@dataclass(slots=True)
class _Choice:
    """The received part of one completion."""

    seed: int
    token_ids: list[int] = field(default_factory=list)
    origins: list[TokenOrigin] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    logprobs: list[PositionLogprobs] = field(default_factory=list)
    repeated: int = 0
    """Characters of the echoed prompt that will be repeated."""
    output: CompletionOutput | None = None


class StreamAssembler:
    """Turns messages into chunks, and finally into `result`."""

    def __init__(self, sampling: common_pb2.SamplingParams | None = None) -> None:
        """`sampling` is the request's: exactly the requested reports must arrive."""
        self.result: GenerationResult | None = None
        self._wants_logprobs = sampling is not None and sampling.HasField("logprobs")
        self._wants_prompt_logprobs = sampling is not None and sampling.HasField("prompt_logprobs")
        self.num_choices = sampling.n if sampling is not None and sampling.HasField("n") else 1
        self._started: generation_pb2.GenerateStarted | None = None
        self._resumes = False
        self._has_failed = False
        """The call's latest message was empty: an error must follow."""
        self._repeated_positions = 0
        """Number of the prompt's log-probabilities that will be repeated."""
        self.mode = AcceptanceMode.COUPLED
        """Set by the server's first message."""
        self._choices: list[_Choice] = []
        self._ended_before: set[int] = set()
        self._prompt_logprobs: list[PositionLogprobs] = []
        self._usages: list[generation_pb2.Usage] = []
        self._cached_prompt_tokens = 0

    @property
    def request_id(self) -> str | None:
        """The id confirmed or chosen by the server; None before its first message."""
        return None if self._started is None else self._started.request_id

    @property
    def last_index(self) -> int | None:
        """Index of the last token received for every choice; None before the first."""
        fewest = min((len(choice.token_ids) for choice in self._choices), default=0)
        return fewest - 1 if fewest else None

    def resume(self) -> tuple[int, codec.Resumption]:
        """Prepare for a following stream. Returns the seed and the received tokens of each choice."""
        assert self._started is not None
        self._resumes = True
        self._ended_before = {i for i, choice in enumerate(self._choices) if choice.output is not None}
        for choice in self._choices:
            choice.repeated = 0 if choice.token_ids else sum(map(len, choice.texts))
        self._repeated_positions = 0 if self._choices[0].token_ids else len(self._prompt_logprobs)
        received = tuple(tuple(choice.token_ids) for choice in self._choices)
        return self._started.seed, codec.Resumption(tuple(map(len, received)), received)

    def end_call(self) -> None:
        """The call has failed; another may follow."""
        self._has_failed = False

    def feed(self, message: generation_pb2.GenerateResponse | None) -> GenerationChunk | None:
        """The chunk of this message, if any. A None message is the end of the stream.

        Raises InternalError, or UnavailableError for a premature end.
        """
        if self._has_failed:
            _broken("it has an empty message")
        if message is None:
            self.require_result()
            return None
        if self.result is not None:
            _broken("it continues after its end")
        if is_empty(message):
            self._has_failed = True
            return None
        part = message.WhichOneof("part")
        if (part == "started") != (self._started is None or self._resumes):
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
            # The codec raises this for an unknown enum number.
            _broken(error.message)
        _broken("it contains a part unknown to this version")

    def _start(self, started: generation_pb2.GenerateStarted) -> None:
        mode = codec.mode_from_proto(started.acceptance_mode)
        seeds = list(started.seeds or [started.seed])
        if self._started is not None:
            self._resumes = False
            before = [choice.seed for choice in self._choices], self.mode, self._started.num_prompt_tokens
            if (seeds, mode, started.num_prompt_tokens) != before:
                _broken("it continues with another request")
            return
        self.mode = mode
        if len(seeds) != self.num_choices or seeds[0] != started.seed:
            _broken(f"it has {len(seeds)} choices instead of {self.num_choices}")
        self._choices = [_Choice(seed) for seed in seeds]
        self._started = started

    def _has_ended_before(self, index: int) -> bool:
        """True, once, for a choice whose end arrived in an earlier stream."""
        told = index in self._ended_before
        self._ended_before.discard(index)
        return told

    def _choice(self, index: int) -> _Choice:
        if index >= len(self._choices):
            _broken(f"there is no choice {index}")
        if self._choices[index].output is not None:
            _broken(f"choice {index} continues after its end")
        return self._choices[index]

    def _extend(self, message: generation_pb2.GenerateChunk) -> GenerationChunk | None:
        choice = self._choice(message.choice)
        if message.index != len(choice.token_ids):
            _broken(f"index {message.index} instead of {len(choice.token_ids)}")
        if len(message.origins) != len(message.token_ids):
            _broken("it must have one origin per token")
        if len(message.logprobs) != (len(message.token_ids) if self._wants_logprobs else 0):
            _broken("it must have log-probabilities for each token exactly if requested")
        if message.prompt_logprobs and not self._wants_prompt_logprobs:
            _broken("the prompt's log-probabilities were not requested")
        chunk = GenerationChunk(
            index=message.index,
            token_ids=tuple(message.token_ids),
            text=self._new_text(choice, message),
            origins=tuple(codec.origin_from_proto(origin) for origin in message.origins),
            choice=message.choice,
            logprobs=_positions(message.logprobs, message.token_ids) if message.logprobs else (),
            prompt_logprobs=self._prompt_positions(message),
        )
        choice.token_ids.extend(chunk.token_ids)
        choice.origins.extend(chunk.origins)
        choice.texts.append(chunk.text)
        choice.logprobs.extend(chunk.logprobs)
        return chunk if chunk.token_ids or chunk.text or chunk.prompt_logprobs else None

    def _new_text(self, choice: _Choice, message: generation_pb2.GenerateChunk) -> str:
        if message.token_ids:
            return message.text
        repeated = min(choice.repeated, len(message.text))
        choice.repeated -= repeated
        return message.text[repeated:]

    def _prompt_positions(self, message: generation_pb2.GenerateChunk) -> tuple[PositionLogprobs, ...]:
        if not message.prompt_logprobs:
            return ()
        assert self._started is not None
        begin = 1 + len(self._prompt_logprobs) - self._repeated_positions
        told = self._started.prompt_token_ids[begin : begin + len(message.prompt_logprobs)]
        positions = _positions(message.prompt_logprobs, told)
        repeated = min(self._repeated_positions, len(positions))
        self._repeated_positions -= repeated
        positions = positions[repeated:]
        self._prompt_logprobs.extend(positions)
        return positions

    def _finish(self, finished: generation_pb2.GenerateFinished) -> GenerationChunk | None:
        if self._has_ended_before(finished.choice):
            return None
        choice = self._choice(finished.choice)
        if finished.usage.completion_tokens != len(choice.token_ids):
            _broken(f"{len(choice.token_ids)} of {finished.usage.completion_tokens} tokens arrived")
        stop = codec.finish_reason_from_proto(finished.finish_reason) is FinishReason.STOP
        reason: Literal["stop", "length"] = "stop" if stop else "length"
        choice.texts.append(finished.text)
        choice.output = CompletionOutput(
            choice=finished.choice,
            seed=choice.seed,
            text="".join(choice.texts),
            token_ids=tuple(choice.token_ids),
            origins=tuple(choice.origins),
            finish_reason=reason,
            stop_reason=_stop_reason(finished),
            logprobs=tuple(choice.logprobs) if self._wants_logprobs else None,
            speculative_decoding=mirror(
                SpeculativeDecoding,
                finished.speculative_decoding,
                by_source=tuple(
                    mirror(SourceCounts, counts) for counts in finished.speculative_decoding.by_source
                ),
            ),
            timings=_timings(finished.timings),
        )
        self._usages.append(finished.usage)
        if finished.choice == 0:
            self._cached_prompt_tokens = finished.usage.cached_prompt_tokens
        outputs = tuple(each.output for each in self._choices if each.output is not None)
        if len(outputs) == len(self._choices):
            self.result = self._whole(outputs)
        return GenerationChunk(
            index=len(choice.token_ids),
            token_ids=(),
            text=finished.text,
            origins=(),
            finish_reason=reason,
            result=self.result,
            choice=finished.choice,
        )

    def _whole(self, outputs: tuple[CompletionOutput, ...]) -> GenerationResult:
        assert self._started is not None
        prompt_tokens = self._usages[0].prompt_tokens
        completion_tokens = sum(usage.completion_tokens for usage in self._usages)
        prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
        if self._wants_prompt_logprobs:
            prompt_logprobs = (None, *self._prompt_logprobs)
            if len(prompt_logprobs) != self._started.num_prompt_tokens:
                _broken("log-probabilities of the prompt are missing")
        return GenerationResult(
            **{f.name: getattr(outputs[0], f.name) for f in fields(CompletionOutput)},
            request_id=self._started.request_id,
            acceptance=self.mode,
            usage=Usage(
                prompt_tokens,
                completion_tokens,
                prompt_tokens + completion_tokens,
                self._cached_prompt_tokens,
            ),
            prompt_token_ids=tuple(self._started.prompt_token_ids) or None,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
        )

    def require_result(self) -> GenerationResult:
        """The result at the end of the stream. Raises UnavailableError after a premature end."""
        if self.result is None:
            raise UnavailableError("the stream ended before the generation did", self.last_index)
        return self.result

    def fail(self, error: PacelineError) -> None:
        """Raise the error that ended the stream, with `last_index` set.

        Returns if the result is complete: a later error cannot change it.
        """
        if self.result is not None:
            return
        if isinstance(error, UnavailableError) and error.last_index is None:
            error.last_index = self.last_index
        raise error


def _positions(
    messages: Iterable[generation_pb2.PositionLogprobs], token_ids: Iterable[int]
) -> tuple[PositionLogprobs, ...]:
    """One mapping per token, starting with the token itself."""
    positions: list[PositionLogprobs] = []
    for message, token_id in zip_longest(messages, token_ids):
        if message is None or not message.tokens or message.tokens[0].token_id != token_id:
            _broken("log-probabilities belong to another token")
        position: dict[int, Logprob] = {}
        for each in message.tokens:
            # The token itself comes first, and is repeated if it is among the most likely.
            position.setdefault(each.token_id, Logprob(each.logprob, each.rank, each.decoded_token))
        positions.append(position)
    return tuple(positions)


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
