"""The validator of client histories finds every planted fault, and none in a valid history."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness.history import History, HistoryError, Recording, validate
from harness.stacks import RunningStack

from paceline.core.errors import InternalError, UnavailableError
from paceline.v1 import generation_pb2 as pb


def started() -> pb.GenerateResponse:
    return pb.GenerateResponse(started=pb.GenerateStarted(request_id="r"))


def chunk(index: int, *token_ids: int) -> pb.GenerateResponse:
    origins = [pb.TOKEN_ORIGIN_TARGET] * len(token_ids)
    return pb.GenerateResponse(chunk=pb.GenerateChunk(index=index, token_ids=token_ids, origins=origins))


def finished(count: int) -> pb.GenerateResponse:
    usage = pb.Usage(completion_tokens=count)
    return pb.GenerateResponse(finished=pb.GenerateFinished(usage=usage))


def good() -> History:
    messages = [started(), chunk(0, 7), chunk(1, 8, 9), chunk(3, 7), finished(4)]
    return History(messages, ended=True)


def failed(last_index: int | None = 2) -> History:
    return History([started(), chunk(0, 7), chunk(1, 8, 9)], error=UnavailableError("gone", last_index))


def test_valid_histories_pass() -> None:
    validate(good())
    validate(good(), expected=(7, 8, 9, 7))
    validate(failed(), expected=(7, 8, 9, 7), complete=False)
    validate(History(error=UnavailableError("nobody is there")), complete=False)
    validate(History([started()], error=InternalError("broken")), complete=False)


def change(edit: Callable[[list[pb.GenerateResponse]], object]) -> History:
    history = good()
    edit(history.messages)
    return history


def without_origins(messages: list[pb.GenerateResponse]) -> None:
    messages[2].chunk.origins.pop()


BAD: dict[str, History] = {
    "began without started": change(lambda m: m.pop(0)),
    "started twice": change(lambda m: m.insert(1, started())),
    "a repeated chunk": change(lambda m: m.insert(3, chunk(1, 8, 9))),
    "a repeated token": change(lambda m: m.insert(3, chunk(2, 9))),
    "a missing chunk": change(lambda m: m.pop(2)),
    "swapped chunks": change(lambda m: m.insert(1, m.pop(2))),
    "an empty chunk": change(lambda m: m.insert(2, chunk(1))),
    "a token without origin": change(without_origins),
    "finished twice": change(lambda m: m.append(finished(4))),
    "a chunk after the end": change(lambda m: m.append(chunk(4, 1))),
    "a message without a part": change(lambda m: m.insert(2, pb.GenerateResponse())),
    "a last chunk lost": change(lambda m: m.pop(3)),
    "never terminated": change(lambda m: m.pop()),
    "finished, then hung": History(good().messages),
    "finished, then failed": History(good().messages, error=UnavailableError("gone", 3)),
    "nothing at all": History(ended=True),
    "an error that forgets a token": failed(1),
    "an error that invents a token": failed(3),
    "an error that names no token": failed(None),
}


@pytest.mark.planted
@pytest.mark.parametrize("name", BAD)
def test_a_planted_history_fault_is_found(name: str) -> None:
    with pytest.raises(HistoryError):
        validate(BAD[name], complete=False)


@pytest.mark.planted
def test_tokens_that_differ_from_the_expected_are_found() -> None:
    for expected in ((7, 8, 9), (7, 8, 9, 9), (7, 8, 9, 7, 7), ()):
        with pytest.raises(HistoryError, match="other tokens"):
            validate(good(), expected)
    with pytest.raises(HistoryError, match="other tokens"):
        validate(failed(), (7, 8, 8, 7), complete=False)


def test_a_failed_request_is_an_incomplete_history() -> None:
    with pytest.raises(HistoryError, match="the request failed"):
        validate(failed())


@pytest.mark.parametrize("k", [0, 5])
def test_a_recorded_history_of_the_service_is_valid(stack: RunningStack, k: int) -> None:
    parameters = {"max_tokens": 30, "temperature": 1.0, "seed": 2, "ignore_eos": True}
    speculation = {"num_speculative_tokens": k}
    expected = stack.client.generate("def main(", parameters, speculation={"num_speculative_tokens": 2})
    recording = Recording(stack.address, "def main(", parameters, speculation)
    recording.wait_for_tokens(5)
    history = recording.result()
    validate(history, expected.token_ids)
    assert history.text == expected.text
    assert history.finished.usage.completion_tokens == 30
