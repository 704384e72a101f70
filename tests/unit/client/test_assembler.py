"""The fold from messages to chunks and result, without a wire."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline.client.assembler import StreamAssembler
from paceline.core.errors import InternalError, UnavailableError
from paceline.v1 import generation_pb2


def feed_all(messages: Any) -> StreamAssembler:
    assembler = StreamAssembler()
    for message in messages:
        assembler.feed(message)
    return assembler


def test_the_result_is_the_sum_of_the_chunks(messages: Any) -> None:
    assembler = StreamAssembler()
    chunks = [c for c in map(assembler.feed, messages.good) if c is not None]
    result = assembler.require_result()
    assert result.text == "".join(c.text for c in chunks) == "Hello!"
    assert result.token_ids == sum((c.token_ids for c in chunks), ())
    assert result.origins == sum((c.origins for c in chunks), ())
    assert assembler.feed(None) is None


@pytest.mark.parametrize(
    ("changes", "reason", "stop_reason"),
    [
        ({}, "stop", "END"),
        ({"stop_string": None, "stop_token_id": 5}, "stop", 5),
        ({"stop_string": None, "stop_token_id": 0}, "stop", 0),
        ({"stop_string": None}, "stop", None),
        ({"stop_string": None, "finish_reason": generation_pb2.FINISH_REASON_LENGTH}, "length", None),
    ],
)
def test_finish_and_stop_reasons_are_reported(
    messages: Any, changes: Any, reason: str, stop_reason: Any
) -> None:
    assembler = feed_all([*messages.good[:-1], messages.finished(**changes)])
    result = assembler.require_result()
    assert (result.finish_reason, result.stop_reason) == (reason, stop_reason)


def test_the_result_is_json(messages: Any) -> None:
    plain = json.loads(json.dumps(feed_all(messages.good).require_result().to_dict()))
    assert plain["origins"] == ["target", "accepted", "correction", "target"]
    assert plain["acceptance"] == "block"
    counts = {"prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7, "cached_prompt_tokens": 0}
    assert plain["usage"] == counts
    assert plain["speculative_decoding"]["acceptance_rate_per_position"] == [1.0, 0.5]


def broken_streams(m: Any) -> dict[str, list[Any]]:
    good = list(m.good)
    return {
        "chunk before started": good[1:],
        "started twice": [good[0], *good],
        "finished before started": good[-1:],
        "a chunk twice": [*good[:2], *good[1:]],
        "a chunk missing": [good[0], good[1], good[3]],
        "chunks out of order": [good[0], good[2], good[1]],
        "after the end": [*good, good[1]],
        "finished twice": [*good, good[-1]],
        "an origin missing": [good[0], m.chunk(0, [1, 2], "", [m.target])],
        "an origin too many": [good[0], m.chunk(0, [1], "", [m.target, m.target])],
        "an unknown origin": [good[0], m.chunk(0, [1], "", [77])],
        "an unset origin": [good[0], m.chunk(0, [1], "", [0])],
        "an unknown mode": [m.started(acceptance_mode=9)],
        "an unset mode": [m.started(acceptance_mode=0)],
        "an unset finish reason": [*good[:-1], m.finished(finish_reason=0)],
        "a count that disagrees": [*good[:-1], m.finished(completion_tokens=5)],
        "an empty message": [*good[:2], generation_pb2.GenerateResponse(), *good[2:]],
        "an empty message first": [generation_pb2.GenerateResponse(), *good],
        "an unknown part": [good[0], generation_pb2.GenerateResponse.FromString(b"\x7a\x00")],
    }


def test_a_broken_stream_is_an_internal_error(messages: Any) -> None:
    for stream in broken_streams(messages).values():
        with pytest.raises(InternalError, match="breaks the protocol"):
            feed_all(stream)


def test_an_early_end_names_the_last_index(messages: Any) -> None:
    for count, last_index in ((0, None), (1, None), (2, 0), (3, 2), (4, 3)):
        assembler = feed_all(messages.good[:count])
        with pytest.raises(UnavailableError) as caught:
            assembler.feed(None)
        assert caught.value.last_index == last_index


def test_the_servers_last_index_is_kept(messages: Any) -> None:
    assembler = feed_all(messages.good[:3])
    with pytest.raises(UnavailableError) as caught:
        assembler.fail(UnavailableError("lost", 9))
    assert caught.value.last_index == 9


@given(st.lists(st.binary(max_size=40), max_size=6))
@settings(max_examples=200, deadline=None)
def test_any_messages_are_assembled_or_refused(payloads: list[bytes]) -> None:
    assembler = StreamAssembler()
    for payload in payloads:
        try:
            message = generation_pb2.GenerateResponse.FromString(payload)
        except Exception as error:
            assert type(error).__name__ == "DecodeError"  # noqa: PT017
            continue
        try:
            assembler.feed(message)
        except InternalError:
            break
