"""Bad input: a typed error that names the field, and a server that goes on serving."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.history import validate
from harness.log import Log
from harness.pair import write_byte_tokenizer
from harness.refusals import refused
from harness.resumed import history_of
from harness.stacks import RunningStack, own_coordinator, own_worker, process
from harness.unread import NARROW, until_it_stands_still
from harness.waiting import HANG, until
from harness.web import Http

from paceline.client import Client, WorkerState, links
from paceline.client.channel import CHANNEL_OPTIONS
from paceline.core import limits
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import NotFoundError, ResourceExhaustedError
from paceline.rpc.codec.status import from_rpc_error
from paceline.supervisor import ChildFailedError, Supervisor
from paceline.v1 import common_pb2
from paceline.v1 import generation_pb2 as pb

UNKNOWN = b"\xfa\x07\x01x"
"""A field no message defines: number 127, a string of one byte."""


def raw_error(stack: RunningStack, message: pb.GenerateRequest | bytes) -> Any:
    """The error that a request is answered with, sent with no SDK between."""
    with grpc.insecure_channel(stack.address) as channel:
        call = channel.unary_stream(
            "/paceline.v1.GenerationService/Generate",
            request_serializer=lambda m: m if isinstance(m, bytes) else m.SerializeToString(),
            response_deserializer=pb.GenerateResponse.FromString,
        )
        with pytest.raises(grpc.RpcError) as failure:
            list(call(message, timeout=HANG))
    assert failure.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    return from_rpc_error(failure.value)


def asking(prompt: dict[str, Any] | None = None, /, **sampling: Any) -> pb.GenerateRequest:
    """For three tokens after some token ids, or after another prompt."""
    message = pb.GenerateRequest(**({"token_ids": pb.TokenIds(ids=[5, 6, 7])} if prompt is None else prompt))
    message.sampling.MergeFrom(common_pb2.SamplingParams(**{"max_tokens": 3, **sampling}))
    return message


def ids(*token_ids: int) -> dict[str, Any]:
    return {"token_ids": pb.TokenIds(ids=token_ids)}


BAD_REQUESTS: dict[str, tuple[str, pb.GenerateRequest | bytes]] = {
    "a value out of range": ("temperature", asking(temperature=-1.0)),
    "an unknown field": ("request", asking().SerializeToString() + UNKNOWN),
    "no prompt": ("prompt", asking({})),
    "an empty text": ("prompt", asking({"text": ""})),
    "a text longer than the model": ("prompt", asking({"text": "x = 1\n" * 20_000})),
    "a prompt longer than the model": ("prompt", asking(ids(*[5] * 5000))),
    "a token id outside the vocabulary": ("prompt", asking(ids(1, 2**32 - 1))),
    "max_tokens beyond the model": ("max_tokens", asking(max_tokens=1_000_000)),
    "a bias outside the vocabulary": ("logit_bias", asking(logit_bias=[{"token_id": 2**31, "bias": 1}])),
    "a stop token outside the vocabulary": ("stop_token_ids", asking(stop_token_ids=[2**31])),
    "a bad word of too many tokens": ("bad_words", asking(bad_words=["\u2603" * 256])),
    "an allowed token outside the vocabulary": ("allowed_token_ids", asking(allowed_token_ids=[1, 2**31])),
}
"""What a model decides; of what needs none, one each: tests/unit/rpc/test_codec.py has the others."""


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused_by_field(stack: RunningStack, name: str) -> None:
    field, message = BAD_REQUESTS[name]
    assert raw_error(stack, message).field == field
    stack.good_request()


def test_masks_that_leave_no_token_are_refused(stack: RunningStack) -> None:
    (word,) = (ids for ids in [stack.client.tokenize("x")] if len(ids) == 1)
    for sampling in (
        {"allowed_token_ids": word, "bad_words": ["x"]},
        {"allowed_token_ids": word, "stop_token_ids": word, "min_tokens": 1},
    ):
        with refused("allowed_token_ids"):
            stack.client.generate("y", sampling, timeout=HANG)
    stack.good_request()


def test_errors_and_logs_do_not_show_the_prompt(stack: RunningStack) -> None:
    error = raw_error(stack, asking({"text": "my secret " * 20_000}))
    assert "secret" not in str(error)
    assert stack.log.find("secret") == []


def test_the_id_of_a_running_request_is_refused(stack: RunningStack) -> None:
    parameters = {"max_tokens": 1500, "ignore_eos": True}
    with stack.client.stream("def main(", parameters, request_id="twin", timeout=HANG) as first:
        next(first)
        assert first.request_id == "twin"
        with refused("request_id"):
            stack.client.generate("x", {"max_tokens": 1}, request_id="twin", timeout=HANG)
    until(lambda: stack.client.status().coordinator.running == 0, "the cancelled request's end")
    again = stack.client.generate("x", {"max_tokens": 1}, request_id="twin", timeout=HANG)
    assert again.request_id == "twin"


def test_invalid_message_bytes_are_refused(stack: RunningStack) -> None:
    with grpc.insecure_channel(stack.address) as channel:
        for method in ("Generate", "Tokenize", "Nonsense"):
            call = channel.unary_stream(
                f"/paceline.v1.GenerationService/{method}",
                request_serializer=lambda m: m,
                response_deserializer=lambda m: m,
            )
            with pytest.raises(grpc.RpcError):
                list(call(b"\xff\xff\xff\xff", timeout=HANG))
    stack.good_request()


@pytest.mark.parametrize("method", ["ListModels", "Tokenize", "Detokenize", "GetStatus", "Cancel"])
def test_an_unknown_field_is_refused_by_every_method(stack: RunningStack, method: str) -> None:
    with grpc.insecure_channel(stack.address) as channel:
        call = channel.unary_unary(f"/paceline.v1.GenerationService/{method}")
        with pytest.raises(grpc.RpcError) as failure:
            call(UNKNOWN, timeout=HANG)
    assert from_rpc_error(failure.value).field == "request"


def test_detokenize_refuses_invalid_token_ids(stack: RunningStack) -> None:
    with refused("token_ids"):
        stack.client.detokenize([5, 2**31])
    assert stack.client.tokenize("") == ()
    assert stack.client.detokenize([]) == ""


def test_an_unknown_method_is_not_found(stack: RunningStack) -> None:
    with grpc.insecure_channel(stack.address) as channel:
        call = channel.unary_unary("/paceline.v1.GenerationService/Train")
        with pytest.raises(grpc.RpcError) as failure:
            call(b"", timeout=HANG)
    assert isinstance(from_rpc_error(failure.value), NotFoundError)


def test_a_draft_with_another_tokenizer_is_not_used(stack: RunningStack, tmp_path: Path) -> None:
    """The draft is refused with both values, status says so, and requests are served without it."""
    foreign = tmp_path / "foreign"
    shutil.copytree(stack.pair.draft, foreign)
    (foreign / "tokenizer.json").unlink()
    write_byte_tokenizer(foreign, end_of_text="<|other|>")
    (foreign / "generation_config.json").write_text(json.dumps({"eos_token_id": 0}))
    target = stack.stack.address_of("target")
    with own_worker("draft", foreign) as draft, own_coordinator(stack.pair, [target], [draft]) as own:
        status = {w.role: w for w in own.client.status().workers}
        assert status["target"].state is WorkerState.READY
        assert status["draft"].state is WorkerState.REFUSED
        ours, theirs = status["target"].info, status["draft"].info
        reason = status["draft"].reason
        pairs = [
            (str(ours.vocabulary_size), str(theirs.vocabulary_size)),
            (ours.tokenizer_fingerprint, theirs.tokenizer_fingerprint),
        ]
        assert any(a != b and a in reason and b in reason for a, b in pairs), reason
        until(lambda: own.log.find("refused"), "the line that says so")
        greedy = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        result, expected = (c.generate("def main(", greedy, timeout=HANG) for c in (own.client, stack.client))
        assert result.speculative_decoding.num_draft_tokens == 0
        assert result.token_ids == expected.token_ids


def test_a_target_with_another_tokenizer_is_refused(stack: RunningStack, tmp_path: Path) -> None:
    """The coordinator with the other tokenizer never becomes ready."""
    folder = tmp_path / "bytes"
    folder.mkdir()
    write_byte_tokenizer(folder, end_of_text="<|other|>")
    config = CoordinatorConfig(
        targets=(stack.stack.address_of("target"),), tokenizer=str(folder), exit_with_parent=True
    )
    log = Log()
    with ThreadPoolExecutor() as pool, Supervisor(sink=log) as supervisor:
        # In a thread: a start that was given up would have ended its process, maybe before it said why.
        starting = pool.submit(supervisor.start, [process("coordinator", "coordinator", config)], HANG)
        until(lambda: log.find("tokenizer_fingerprint of the target"), "the refusal in the log")
        assert not starting.done()
        supervisor.stop()
        with pytest.raises(ChildFailedError, match="stopped before all were ready"):
            starting.result(HANG)
    stack.good_request()


def test_a_slow_reader_loses_nothing(
    stack: RunningStack, http: Http, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client that pauses gets every token in the end, and others are served meanwhile."""
    monkeypatch.setattr(links, "CHANNEL_OPTIONS", (*CHANNEL_OPTIONS, *NARROW))
    # Messages that fill the buffers between.
    parameters = {"max_tokens": 1500, "temperature": 1.0, "seed": 4, "ignore_eos": True, "logprobs": 20}
    before = http.total("paceline:generation_tokens_total")
    with Client(stack.address) as client:
        stream = client.stream("import", parameters, timeout=HANG)
        chunks = [next(stream)]
        generated = until_it_stands_still(lambda: http.total("paceline:generation_tokens_total") - before)
        assert limits.MAX_UNREAD_TOKENS <= generated < 1500
        stack.good_request()
        assert stack.client.status().coordinator.running == 1
        chunks.extend(stream)
    assert stream.num_resumes == 0
    whole = stack.client.generate("import", {**parameters, "logprobs": None}, timeout=HANG)
    validate(history_of(chunks), whole.token_ids)
    assert stream.result.text == whole.text


def test_a_full_queue_refuses_with_a_clear_error(stack: RunningStack) -> None:
    """One request runs, one waits, the third is refused; when they are gone it is served."""
    long = {"max_tokens": 1500, "ignore_eos": True}
    with own_coordinator(stack.pair, [stack.stack.address_of("target")], max_running=1, max_waiting=1) as own:
        with own.client.stream("import", long, timeout=HANG) as first:
            next(first)
            with own.client.stream("import", long, timeout=HANG):
                until(lambda: own.client.status().coordinator.waiting == 1, "the second request in the queue")
                with pytest.raises(ResourceExhaustedError, match="waiting already"):
                    own.client.generate("x", {"max_tokens": 1}, timeout=HANG)
        # What a client gave up is gone once the coordinator has heard of it.
        until(lambda: own.client.status().coordinator.waiting == 0, "the end of the second request")
        assert own.client.generate("x", {"max_tokens": 2}, timeout=HANG).usage.completion_tokens in (1, 2)
    stack.check_pools_whole()
