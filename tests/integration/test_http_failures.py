"""HTTP failures: bad requests, clients that leave, and the end of the process."""

from __future__ import annotations

import json
import signal
import threading
from typing import Any

import httpx2
import openai
import pytest
from harness.pair import Pair
from harness.stacks import RunningStack, own_coordinator
from harness.waiting import HANG, until
from harness.web import Http, connect

from paceline.client import SamplingParams
from paceline.supervisor import ChildFailedError

MESSAGES: list[Any] = [{"role": "user", "content": "Hello."}]
LONG: dict[str, Any] = {"max_tokens": 1500, "temperature": 1.0, "seed": 1}
EVERYTHING: dict[str, Any] = {"ignore_eos": True}


# ---- errors ---------------------------------------------------------------------------------------


def test_a_model_without_a_template_refuses_chats(http: Http) -> None:
    with pytest.raises(openai.BadRequestError, match="has no chat template") as caught:
        http.chat(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize(
    ("values", "param", "code"),
    [
        ({"temperature": -1}, "temperature", "invalid_value"),
        ({"max_tokens": 10**6}, "max_tokens", "context_length_exceeded"),
        ({"max_tokens": "many"}, "max_tokens", "invalid_type"),
        ({"n": 1000}, "n", "invalid_value"),
        ({"suffix": "end"}, "suffix", "unsupported_parameter"),
        ({"extra_body": {"temprature": 1}}, "temprature", "unknown_parameter"),
        ({"prompt": [10**9]}, "prompt", "invalid_value"),
        ({"logprobs": 21}, "logprobs", "invalid_value"),
        ({"stream": True, "top_p": 0}, "top_p", "invalid_value"),
    ],
)
def test_a_refused_parameter_is_named(values: dict[str, Any], param: str, code: str, http: Http) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        http.openai.completions.create(**{"model": http.model, "prompt": "x", **values})
    assert (caught.value.param, caught.value.code) == (param, code)


def test_an_unknown_model_is_not_found(http: Http) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        http.openai.completions.create(model="gpt", prompt="x")
    assert caught.value.code == "model_not_found"
    assert http.openai.models.retrieve(http.model).id == http.model


def test_a_request_larger_than_the_queue_is_refused(stack: RunningStack, pair_paths: Pair) -> None:
    """All choices of a request begin or none does; later there is room again."""
    workers = [stack.stack.address_of("target")]
    with own_coordinator(pair_paths, workers, max_running=1, max_waiting=1) as own:
        (http,) = [*connect(own.supervisor.status("coordinator").http_address)]
        with own.client.stream("def main(", SamplingParams(ignore_eos=True, **LONG)) as running:
            next(iter(running))
            answer = http.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 4})
            assert answer.status_code == 429
            assert answer.json()["error"]["code"] == "rate_limit_exceeded"
            assert "retry-after" in answer.headers
        until(lambda: own.client.status().coordinator.running == 0, "the end of what was taken on")
        answer = http.post("/v1/completions", {"prompt": "x", "n": 3, "max_tokens": 4})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "n")
        assert http.post("/v1/completions", {"prompt": "x", "n": 2, "max_tokens": 4}).status_code == 200
    stack.check_pools_whole()


def test_an_occupied_port_is_reported(http: Http, stack: RunningStack, pair_paths: Pair) -> None:
    port = int(http.url.rpartition(":")[2])
    with (
        pytest.raises(ChildFailedError, match=rf"--http-port: 127\.0\.0\.1:{port} is in use"),
        own_coordinator(pair_paths, [stack.stack.address_of("target")], http_port=port),
    ):
        pass


# ---- clients that leave, and the end --------------------------------------------------------------


def test_closing_an_http_stream_frees_both_caches(http: Http, stack: RunningStack) -> None:
    finished = stack.num_finished()
    stream = http.complete("def main(", stream=True, extra_body=EVERYTHING, **LONG)
    next(iter(stream))
    assert stack.client.status().coordinator.running == 1
    stream.close()
    stack.check_cut_short(finished)


def test_leaving_before_the_answer_frees_both_caches(http: Http, stack: RunningStack) -> None:
    stack.good_request()
    finished = stack.num_finished()
    with pytest.raises(openai.APITimeoutError):
        http.complete("def main(", n=4, timeout=0.3, extra_body=EVERYTHING, **LONG)
    stack.check_cut_short(finished)


def test_a_stream_longer_than_the_drain_ends_with_an_error(stack: RunningStack, pair_paths: Pair) -> None:
    """It cannot be resumed over HTTP, so its client is told what has ended it."""
    with own_coordinator(pair_paths, [stack.stack.address_of("target")], drain_timeout=0.2) as own:
        (http,) = [*connect(own.supervisor.status("coordinator").http_address)]
        values = {"prompt": "def main(", "stream": True, **LONG, **EVERYTHING}
        with httpx2.stream("POST", f"{http.url}/v1/completions", json=values, timeout=HANG) as answer:
            lines = answer.iter_lines()
            next(lines)
            with stack.standing_target():
                own.supervisor.signal("coordinator", signal.SIGTERM)
                rest = [line for line in lines if line]
        assert answer.status_code == 200
        assert "data: [DONE]" not in rest
        error = json.loads(rest[-1].removeprefix("data: "))["error"]
        assert (error["code"], error["message"]) == ("service_unavailable", "the coordinator is stopping")
    stack.check_pools_whole()


def test_a_stopping_coordinator_finishes_its_streams(stack: RunningStack, pair_paths: Pair) -> None:
    with own_coordinator(pair_paths, [stack.stack.address_of("target")], drain_timeout=HANG) as own:
        address = own.supervisor.status("coordinator").http_address
        (http,) = [*connect(address)]
        values = {"prompt": "def main(", "stream": True, "max_tokens": 400, "seed": 1, **EVERYTHING}
        refusals: list[int] = []

        def ask_until_gone() -> None:
            while True:
                try:
                    refusals.append(
                        http.post("/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code
                    )
                except httpx2.TransportError:
                    return

        with httpx2.stream("POST", f"{http.url}/v1/completions", json=values, timeout=HANG) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            with stack.standing_target():
                own.supervisor.signal("coordinator", signal.SIGTERM)
                until(lambda: http.get("/health").status_code == 503, "the draining")
                asking = threading.Thread(target=ask_until_gone)
                asking.start()
                until(lambda: refusals, "a refusal")
            rest = [line for line in lines if line]
            asking.join(HANG)
        assert rest[-1] == "data: [DONE]"
        events = [json.loads(line[6:]) for line in (first, *rest[:-1])]
        assert events[-1]["choices"][0]["finish_reason"] == "length"
        assert set(refusals) == {503}, "once refused, always refused"
        status = own.supervisor.wait_until("coordinator", lambda s: s.ready and s.starts > 1, HANG)
        assert status.http_address == address
        assert http.get("/health").status_code == 200
