"""Bad input: a typed error that names the field, and a server that goes on serving."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from harness.history import validate
from harness.log import Log
from harness.pair import write_byte_tokenizer
from harness.resumed import history_of
from harness.stacks import RunningStack, own_coordinator, own_worker
from harness.unread import NARROW, until_it_stands_still
from harness.waiting import HANG, until
from harness.web import Http

from paceline.client import Client, WorkerState, sync_client
from paceline.client.channel import CHANNEL_OPTIONS
from paceline.core import limits
from paceline.core.errors import InvalidArgumentError, NotFoundError, ResourceExhaustedError
from paceline.core.errors import TokenizerMismatchError as Mismatch
from paceline.rpc.codec.status import from_rpc_error
from paceline.v1 import common_pb2
from paceline.v1 import generation_pb2 as pb

NAN, INF = float("nan"), float("inf")
UNKNOWN = b"\xfa\x07\x01x"
"""A field no message defines: number 127, a string of one byte."""


def request(**changes: Any) -> pb.GenerateRequest:
    """A good request, changed."""
    message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]))
    message.sampling.max_tokens = 3
    for name, value in changes.items():
        setattr(message.sampling, name, value)
    return message


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


BAD_SAMPLING: dict[str, tuple[str, dict[str, Any]]] = {
    "negative temperature": ("temperature", {"temperature": -1.0}),
    "temperature not a number": ("temperature", {"temperature": NAN}),
    "infinite temperature": ("temperature", {"temperature": INF}),
    "tiny temperature": ("temperature", {"temperature": 1e-30}),
    "top_p zero": ("top_p", {"top_p": 0.0}),
    "top_p above one": ("top_p", {"top_p": 1.5}),
    "top_p not a number": ("top_p", {"top_p": NAN}),
    "negative top_k": ("top_k", {"top_k": -7}),
    "min_p above one": ("min_p", {"min_p": 1.01}),
    "repetition_penalty zero": ("repetition_penalty", {"repetition_penalty": 0.0}),
    "repetition_penalty not a number": ("repetition_penalty", {"repetition_penalty": NAN}),
    "presence_penalty too large": ("presence_penalty", {"presence_penalty": 2.5}),
    "frequency_penalty infinite": ("frequency_penalty", {"frequency_penalty": -INF}),
    "max_tokens zero": ("max_tokens", {"max_tokens": 0}),
    "max_tokens negative": ("max_tokens", {"max_tokens": -5}),
    "max_tokens beyond the model": ("max_tokens", {"max_tokens": 1_000_000}),
    "min_tokens negative": ("min_tokens", {"min_tokens": -1}),
    "min_tokens above max_tokens": ("min_tokens", {"min_tokens": 4}),
    "n zero": ("n", {"n": 0}),
    "n too large": ("n", {"n": limits.MAX_N + 1}),
    "logprobs too large": ("logprobs", {"logprobs": limits.MAX_LOGPROBS + 1}),
    "prompt_logprobs too large": ("prompt_logprobs", {"prompt_logprobs": limits.MAX_LOGPROBS + 1}),
}


@pytest.mark.parametrize("name", BAD_SAMPLING)
def test_bad_sampling_parameters_are_refused_by_field(stack: RunningStack, name: str) -> None:
    field, changes = BAD_SAMPLING[name]
    error = raw_error(stack, request(**changes))
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    stack.good_request()


def with_speculation(**values: Any) -> pb.GenerateRequest:
    message = request()
    for name, value in values.items():
        setattr(message.speculation, name, value)
    return message


def with_sampling_list(name: str, values: list[Any]) -> pb.GenerateRequest:
    message = request()
    getattr(message.sampling, name).extend(values)
    return message


def with_prompt(**prompt: Any) -> pb.GenerateRequest:
    message = pb.GenerateRequest(**prompt)
    message.sampling.max_tokens = 3
    return message


def with_unknown(where: str) -> bytes:
    """A request with an unknown field in one of its messages."""
    message = request()
    message.speculation.num_speculative_tokens = 2
    if where == "request":
        return message.SerializeToString() + UNKNOWN
    part = getattr(message, where)
    part.ParseFromString(part.SerializeToString() + UNKNOWN)
    return message.SerializeToString()


Bias = common_pb2.LogitBias
BAD_REQUESTS: dict[str, tuple[str, Callable[[], pb.GenerateRequest | bytes]]] = {
    "unknown field of the request": ("request", lambda: with_unknown("request")),
    "unknown sampling parameter": ("sampling", lambda: with_unknown("sampling")),
    "unknown speculation parameter": ("speculation", lambda: with_unknown("speculation")),
    "unknown field of the prompt": ("prompt", lambda: with_unknown("token_ids")),
    "no prompt": ("prompt", with_prompt),
    "empty text": ("prompt", lambda: with_prompt(text="")),
    "no token ids": ("prompt", lambda: with_prompt(token_ids=pb.TokenIds())),
    "token id outside the vocabulary": (
        "prompt",
        lambda: with_prompt(token_ids=pb.TokenIds(ids=[1, 2**32 - 1])),
    ),
    "prompt longer than the model": ("prompt", lambda: with_prompt(token_ids=pb.TokenIds(ids=[5] * 5000))),
    "text longer than the model": ("prompt", lambda: with_prompt(text="x = 1\n" * 20_000)),
    "K over the limit": (
        "num_speculative_tokens",
        lambda: with_speculation(num_speculative_tokens=limits.MAX_SPECULATIVE_TOKENS + 1),
    ),
    "unknown acceptance mode": ("acceptance", lambda: with_speculation(acceptance_mode=77)),
    "bias outside the vocabulary": (
        "logit_bias",
        lambda: with_sampling_list("logit_bias", [Bias(token_id=2**31, bias=1)]),
    ),
    "bias not a number": (
        "logit_bias",
        lambda: with_sampling_list("logit_bias", [Bias(token_id=1, bias=NAN)]),
    ),
    "bias named twice": (
        "logit_bias",
        lambda: with_sampling_list("logit_bias", [Bias(token_id=1, bias=1), Bias(token_id=1, bias=2)]),
    ),
    "empty stop string": ("stop", lambda: with_sampling_list("stop", [""])),
    "too many stop strings": ("stop", lambda: with_sampling_list("stop", ["x"] * 17)),
    "stop token outside the vocabulary": (
        "stop_token_ids",
        lambda: with_sampling_list("stop_token_ids", [2**31]),
    ),
    "empty bad word": ("bad_words", lambda: with_sampling_list("bad_words", [""])),
    "too many bad words": ("bad_words", lambda: with_sampling_list("bad_words", ["x"] * 129)),
    "a bad word of too many tokens": ("bad_words", lambda: with_sampling_list("bad_words", ["\u2603" * 256])),
    "allowed token outside the vocabulary": (
        "allowed_token_ids",
        lambda: with_sampling_list("allowed_token_ids", [1, 2**31]),
    ),
    "long request id": (
        "request_id",
        lambda: pb.GenerateRequest(request_id="x" * 129, text="x"),
    ),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_requests_are_refused_by_field(stack: RunningStack, name: str) -> None:
    field, make = BAD_REQUESTS[name]
    error = raw_error(stack, make())
    assert isinstance(error, InvalidArgumentError)
    assert error.field == field
    stack.good_request()


@pytest.mark.parametrize(
    ("field", "prompt", "sampling", "speculation"),
    [
        ("temprature", "x", {"temprature": 1.0}, None),
        ("num_draft", "x", {}, {"num_draft": 3}),
        ("temperature", "x", {"temperature": -0.5}, None),
        ("temperature", "x", {"temperature": NAN}, None),
        ("temperature", "x", {"temperature": True}, None),
        ("seed", "x", {"seed": -1}, None),
        ("num_speculative_tokens", "x", {}, {"num_speculative_tokens": 33}),
        ("acceptance", "x", {}, {"acceptance": "typical"}),
        ("prompt", "", {}, None),
        ("prompt", [], {}, None),
        ("prompt", [5, -1], {}, None),
        ("prompt", [5, 4_000_000_000], {}, None),
        ("prompt", [5] * 5000, {}, None),
        ("max_tokens", "x", {"max_tokens": 1_000_000}, None),
        ("stop_token_ids", "x", {"stop_token_ids": [4_000_000_000]}, None),
        ("bad_words", "x", {"bad_words": [5]}, None),
        ("allowed_token_ids", "x", {"allowed_token_ids": []}, None),
        ("allowed_token_ids", "x", {"allowed_token_ids": [4_000_000_000]}, None),
        ("n", "x", {"n": 0}, None),
        ("logprobs", "x", {"logprobs": 21}, None),
        ("prompt_logprobs", "x", {"prompt_logprobs": True}, None),
        ("echo", "x", {"echo": "yes"}, None),
    ],
)
def test_the_sdk_names_the_refused_field(
    stack: RunningStack, field: str, prompt: Any, sampling: Any, speculation: Any
) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        stack.client.generate(prompt, sampling, speculation=speculation, timeout=HANG)
    assert failure.value.field == field
    stack.good_request()


def test_masks_that_leave_no_token_are_refused(stack: RunningStack) -> None:
    (word,) = (ids for ids in [stack.client.tokenize("x")] if len(ids) == 1)
    for sampling in (
        {"allowed_token_ids": word, "bad_words": ["x"]},
        {"allowed_token_ids": word, "stop_token_ids": word, "min_tokens": 1},
    ):
        with pytest.raises(InvalidArgumentError) as failure:
            stack.client.generate("y", sampling, timeout=HANG)
        assert failure.value.field == "allowed_token_ids"
    stack.good_request()


def test_errors_and_logs_do_not_show_the_prompt(stack: RunningStack) -> None:
    error = raw_error(stack, with_prompt(text="my secret " * 20_000))
    assert "secret" not in str(error)
    assert stack.log.find("secret") == []


def test_the_id_of_a_running_request_is_refused(stack: RunningStack) -> None:
    parameters = {"max_tokens": 1500, "ignore_eos": True}
    with stack.client.stream("def main(", parameters, request_id="twin", timeout=HANG) as first:
        next(first)
        assert first.request_id == "twin"
        with pytest.raises(InvalidArgumentError) as failure:
            stack.client.generate("x", {"max_tokens": 1}, request_id="twin", timeout=HANG)
        assert failure.value.field == "request_id"
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
    error = from_rpc_error(failure.value)
    assert isinstance(error, InvalidArgumentError)
    assert error.field == "request"


def test_detokenize_refuses_invalid_token_ids(stack: RunningStack) -> None:
    with pytest.raises(InvalidArgumentError) as failure:
        stack.client.detokenize([5, 2**31])
    assert failure.value.field == "token_ids"
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
    with (
        own_worker("draft", foreign) as draft,
        own_coordinator(stack.pair, [target], [draft]) as own,
    ):
        status = {w.role: w for w in own.client.status().workers}
        assert status["target"].state is WorkerState.READY
        assert status["draft"].state is WorkerState.REFUSED
        ours, theirs = status["target"].info, status["draft"].info
        assert ours is not None
        assert theirs is not None
        reason = status["draft"].reason
        pairs = [
            (str(ours.vocabulary_size), str(theirs.vocabulary_size)),
            (ours.tokenizer_fingerprint, theirs.tokenizer_fingerprint),
        ]
        assert any(a != b and a in reason and b in reason for a, b in pairs), reason
        until(lambda: own.log.find("refused"), "the line that says so")
        result = own.client.generate(
            "def main(", {"max_tokens": 8, "temperature": 0, "ignore_eos": True}, timeout=HANG
        )
        assert result.speculative_decoding.num_draft_tokens == 0
        expected = stack.client.generate(
            "def main(", {"max_tokens": 8, "temperature": 0, "ignore_eos": True}, timeout=HANG
        )
        assert result.token_ids == expected.token_ids


def test_serve_refuses_models_with_different_tokenizers(stack: RunningStack, tmp_path: Path) -> None:
    """`serve` refuses such a pair before it loads anything."""
    from harness.stacks import stack_config

    from paceline.supervisor import serve_stack

    shutil.copytree(stack.pair.draft, tmp_path / "draft")
    (tmp_path / "draft" / "tokenizer.json").unlink()
    write_byte_tokenizer(tmp_path / "draft", end_of_text="<|other|>")
    config = stack_config(stack.pair, draft_model=str(tmp_path / "draft"))
    with pytest.raises(Mismatch, match="do not share a vocabulary"), serve_stack(config, sink=Log()):
        pass


def test_a_target_with_another_tokenizer_is_refused(stack: RunningStack, tmp_path: Path) -> None:
    """The coordinator with the other tokenizer never becomes ready."""
    from harness.stacks import process

    from paceline.core.config import CoordinatorConfig
    from paceline.supervisor import ChildFailedError, Supervisor

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
    monkeypatch.setattr(sync_client, "CHANNEL_OPTIONS", (*CHANNEL_OPTIONS, *NARROW))
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
    assert stream.result is not None
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
