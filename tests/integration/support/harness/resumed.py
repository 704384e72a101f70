"""One choice as an SDK user received it, as a history for the validator."""

from __future__ import annotations

from collections.abc import Sequence

from harness.history import History
from paceline.client import GenerationChunk
from paceline.v1 import generation_pb2 as pb


def history_of(chunks: Sequence[GenerationChunk]) -> History:
    """The chunks as messages. What tells of the prompt only is left out: it has no index."""
    messages = [pb.GenerateResponse(started=pb.GenerateStarted())]
    for chunk in chunks:
        if chunk.token_ids:
            origins = [pb.TOKEN_ORIGIN_TARGET for _ in chunk.origins]
            told = pb.GenerateChunk(
                index=chunk.index, token_ids=chunk.token_ids, text=chunk.text, origins=origins
            )
            messages.append(pb.GenerateResponse(chunk=told))
        elif chunk.finish_reason is not None:
            usage = pb.Usage(completion_tokens=chunk.index)
            messages.append(pb.GenerateResponse(finished=pb.GenerateFinished(text=chunk.text, usage=usage)))
    return History(messages, ended=True)
