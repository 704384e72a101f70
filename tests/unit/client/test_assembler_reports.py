"""Several choices, log-probabilities and an echoed prompt in the fold from messages to a result."""

from __future__ import annotations

import json
from typing import Any

import pytest

from paceline.client import Logprob
from paceline.client.assembler import StreamAssembler
from paceline.core.errors import InternalError, UnavailableError
from paceline.v1 import common_pb2, generation_pb2

Response = generation_pb2.GenerateResponse


def position(token_id: int, *others: int, logprob: float = -0.5) -> generation_pb2.PositionLogprobs:
    tokens = [
        generation_pb2.Logprob(token_id=token, logprob=logprob - i, rank=i + 1, decoded_token=f"<{token}>")
        for i, token in enumerate((token_id, *others))
    ]
    return generation_pb2.PositionLogprobs(tokens=tokens)


def finished(m: Any, choice: int, count: int, text: str = "") -> Response:
    usage = generation_pb2.Usage(prompt_tokens=3, completion_tokens=count, total_tokens=3 + count)
    message: Response = m.finished(completion_tokens=count, usage=usage, text=text, choice=choice)
    return message


def chunk(m: Any, choice: int, index: int, token_ids: list[int], text: str, **reports: Any) -> Response:
    message: Response = m.chunk(index, token_ids, text, [m.target] * len(token_ids))
    message.chunk.choice = choice
    for name, positions in reports.items():
        getattr(message.chunk, name).extend(positions)
    return message


def fold(messages: list[Response], **sampling: Any) -> tuple[StreamAssembler, list[Any]]:
    assembler = StreamAssembler(common_pb2.SamplingParams(**sampling))
    return assembler, [c for c in map(assembler.feed, messages) if c is not None]


def two_choices(m: Any) -> list[Response]:
    return [
        m.started(seeds=[7, 99]),
        chunk(m, 0, 0, [11], "a"),
        chunk(m, 1, 0, [21, 22], "x"),
        chunk(m, 0, 1, [12], "b"),
        finished(m, 0, 2, "!"),
        chunk(m, 1, 2, [23], "y"),
        finished(m, 1, 3, "?"),
    ]


def test_choices_are_kept_apart(messages: Any) -> None:
    assembler, chunks = fold(two_choices(messages), n=2)
    result = assembler.require_result()
    assert [c.choice for c in chunks] == [0, 1, 0, 0, 1, 1]
    assert [(o.choice, o.seed, o.text, o.token_ids) for o in result.outputs] == [
        (0, 7, "ab!", (11, 12)),
        (1, 99, "xy?", (21, 22, 23)),
    ]
    assert (result.choice, result.seed, result.text, result.token_ids) == (0, 7, "ab!", (11, 12))
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (3, 5)
    assert result.usage.total_tokens == 8
    assert [c.result for c in chunks] == [None] * 5 + [result]
    assert [c.finish_reason for c in chunks] == [None, None, None, "stop", None, "stop"]


def test_one_choice_is_not_listed_twice(messages: Any) -> None:
    assembler, _ = fold(list(messages.good))
    result = assembler.require_result()
    assert [output.text for output in result.outputs] == [result.text]
    assert "outputs" not in result.to_dict()
    several, _ = fold(two_choices(messages), n=2)
    assert [o["text"] for o in several.require_result().to_dict()["outputs"]] == ["ab!", "xy?"]


def test_log_probabilities_begin_with_the_chosen_token(messages: Any) -> None:
    stream = [
        messages.started(prompt_token_ids=[1, 2, 3]),
        chunk(messages, 0, 0, [], "", prompt_logprobs=[position(2, 9)]),
        chunk(messages, 0, 0, [], "", prompt_logprobs=[position(3)]),
        chunk(messages, 0, 0, [11, 12], "ab", logprobs=[position(11, 5, 11), position(12, logprob=-2.0)]),
        finished(messages, 0, 2),
    ]
    assembler, chunks = fold(stream, logprobs=2, prompt_logprobs=1)
    result = assembler.require_result()
    assert result.logprobs == (
        {11: Logprob(-0.5, 1, "<11>"), 5: Logprob(-1.5, 2, "<5>")},
        {12: Logprob(-2.0, 1, "<12>")},
    )
    assert result.cumulative_logprob == -2.5
    assert result.prompt_token_ids == (1, 2, 3)
    assert result.prompt_logprobs == (
        None,
        {2: Logprob(-0.5, 1, "<2>"), 9: Logprob(-1.5, 2, "<9>")},
        {3: Logprob(-0.5, 1, "<3>")},
    )
    assert [len(c.prompt_logprobs) for c in chunks] == [1, 1, 0, 0]
    plain = json.loads(json.dumps(result.to_dict()))
    assert plain["logprobs"][0]["5"] == {"logprob": -1.5, "rank": 2, "decoded_token": "<5>"}
    assert plain["cumulative_logprob"] == -2.5


def test_every_completion_has_its_log_probability_sum(messages: Any) -> None:
    m = messages
    stream = [
        m.started(seeds=[7, 99]),
        chunk(m, 0, 0, [11], "a", logprobs=[position(11)]),
        chunk(m, 1, 0, [21, 22], "x", logprobs=[position(21), position(22, logprob=-2.0)]),
        finished(m, 0, 1),
        finished(m, 1, 2),
    ]
    plain = fold(stream, n=2, logprobs=0)[0].require_result().to_dict()
    assert plain["cumulative_logprob"] == -0.5
    assert [output["cumulative_logprob"] for output in plain["outputs"]] == [-0.5, -2.5]


def test_unrequested_reports_are_absent(messages: Any) -> None:
    assembler, _ = fold(list(messages.good))
    result = assembler.require_result()
    assert (result.logprobs, result.prompt_logprobs, result.prompt_token_ids) == (None, None, None)
    assert result.cumulative_logprob is None
    assert result.to_dict()["cumulative_logprob"] is None


def test_a_stream_unlike_the_request_is_refused(messages: Any) -> None:
    m = messages
    start, one = m.started(prompt_token_ids=[1, 2, 3]), m.started()
    token = chunk(m, 0, 0, [11], "a", logprobs=[position(11)])
    prompt = chunk(m, 0, 0, [], "", prompt_logprobs=[position(2), position(3)])
    broken: list[tuple[dict[str, Any], list[Response]]] = [
        ({"n": 2}, [one]),
        ({"n": 2}, [m.started(seeds=[8, 9])]),
        ({}, [m.started(seeds=[7, 9])]),
        ({"n": 2}, [m.started(seeds=[7, 9]), chunk(m, 2, 0, [1], "")]),
        ({"n": 2}, [*two_choices(m)[:5], chunk(m, 0, 2, [13], "")]),
        ({"n": 2}, [*two_choices(m), chunk(m, 1, 3, [13], "")]),
        ({}, [one, token]),
        ({"logprobs": 1}, [one, chunk(m, 0, 0, [11], "a")]),
        ({"logprobs": 1}, [one, chunk(m, 0, 0, [12], "a", logprobs=[position(11)])]),
        ({"logprobs": 1}, [one, chunk(m, 0, 0, [11], "a", logprobs=[position(11), position(12)])]),
        ({"logprobs": 1}, [one, chunk(m, 0, 0, [11], "a", logprobs=[generation_pb2.PositionLogprobs()])]),
        ({}, [start, prompt]),
        ({"prompt_logprobs": 0}, [start, prompt, prompt]),
        ({"prompt_logprobs": 0}, [start, chunk(m, 0, 0, [], "", prompt_logprobs=[position(3)])]),
        ({"prompt_logprobs": 0}, [start, *m.good[1:]]),
    ]
    for sampling, stream in broken:
        with pytest.raises(InternalError, match="breaks the protocol"):
            fold(stream, **sampling)


def test_the_last_index_is_common_to_all_choices(messages: Any) -> None:
    for count, last_index in ((1, None), (2, None), (3, 0), (4, 1), (5, 1)):
        assembler, _ = fold(two_choices(messages)[:count], n=2)
        with pytest.raises(UnavailableError) as caught:
            assembler.feed(None)
        assert caught.value.last_index == last_index
