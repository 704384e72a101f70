"""Metrics, traces and log lines of real processes."""

from __future__ import annotations

import contextlib
import json
import re
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
import httpx2
import pytest
from harness.collector import Collector, Span, collecting
from harness.pair import Pair
from harness.stacks import RunningStack, own_coordinator, running_stack
from harness.waiting import HANG, until
from prometheus_client.parser import text_string_to_metric_families

from paceline.client import TokenOrigin
from paceline.client.results import to_plain
from paceline.core.errors import InvalidArgumentError
from paceline.telemetry.traceparent import TraceParent
from paceline.v1 import generation_pb2 as pb

MARK = "xylophone quagmire"
"""In every prompt of this module, and in what it generates."""
CLOCKS = 1_000_000
"""Nanoseconds by which two processes may read the same moment apart."""
SIX = {"max_tokens": 6, "seed": 1, "ignore_eos": True}
C_LINE = re.compile(r"\] [IWEF]\d{4} ")
SERVICES = {"paceline-coordinator", "paceline-target", "paceline-draft"}


Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]
"""`/metrics`: (name, labels) to value."""


@dataclass
class Watched:
    """A stack with everything switched on."""

    running: RunningStack
    collector: Collector
    http: str

    def samples(self, url: str | None = None) -> Samples:
        """What `/metrics` says."""
        with urllib.request.urlopen(url or f"{self.http}/metrics", timeout=HANG) as answer:
            text = answer.read().decode()
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def total(self, name: str, url: str | None = None, **labels: str) -> float:
        """The sum of a metric's samples that have these labels."""
        return sum(
            value
            for (found, of), value in self.samples(url).items()
            if found == f"paceline:{name}" and frozenset(labels.items()) <= of
        )

    def lines(self) -> list[dict[str, Any]]:
        """The log lines of all processes."""
        found = self.running.log.find('] {"time": ')
        return [json.loads(line.partition("] ")[2]) for line in found]

    def calls(self, **having: Any) -> list[dict[str, Any]]:
        """The lines that were written at the ends of calls."""
        lines = [line for line in self.lines() if line["message"] == "call ended"]
        return [line for line in lines if having.items() <= line.items()]

    def trace(self, trace_id: str, rounds: int) -> list[Span]:
        """The spans of a trace, once the request's and those of all its rounds are there.

        Every process sends its own when it likes: also the drafts that rounds waited for must have come.
        """

        def complete() -> list[Span]:
            spans = self.collector.of_trace(trace_id)
            names = Counter(span.name for span in spans)
            done = any(span.name.startswith(("text_completion", "chat")) for span in spans)
            waited = sum(waited_for_draft(span) for span in spans if is_committed(span))
            committed = sum(map(is_committed, spans))
            there = committed == rounds <= names["verify"] and names["draft"] >= waited
            return spans if done and there else []

        return until(complete, f"the trace {trace_id} with {rounds} rounds")


def is_committed(span: Span) -> bool:
    """True for a round, unless it was begun behind the end of its sequence."""
    return span.name == "round" and span.attributes["paceline.num_committed_tokens"] > 0


def waited_for_draft(span: Span) -> bool:
    """True for a round whose proposal had to come from the draft first."""
    return span.attributes["paceline.num_draft_tokens"] > 0 and not any(
        span.attributes[f"paceline.{name}"] for name in ("lookahead_hit", "prompt_lookup")
    )


@pytest.fixture(scope="module")
def watched(pair_paths: Pair) -> Iterator[Watched]:
    with pytest.MonkeyPatch.context() as patched, collecting() as collector:
        # Milliseconds until a process sends its spans; else five seconds in every test.
        patched.setenv("OTEL_BSP_SCHEDULE_DELAY", "200")
        with running_stack(
            pair_paths,
            num_speculative_tokens=3,
            log_format="json",
            otlp_traces_endpoint=collector.endpoint,
            target_metrics_port=0,
            draft_metrics_port=0,
        ) as running:
            yield Watched(running, collector, f"http://{running.stack.http_address}")


def complete(watched: Watched, **values: Any) -> httpx2.Response:
    headers = values.pop("headers", {})
    body = {"prompt": f"{MARK}\ndef main():", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    return httpx2.post(f"{watched.http}/v1/completions", json=body | values, headers=headers, timeout=HANG)


# ---- metrics --------------------------------------------------------------------------------------


def growth(before: Samples, after: Samples, name: str, **labels: str) -> float:
    """By how much the samples of a metric that have these labels grew together."""
    return sum(
        value - before.get((found, of), 0.0)
        for (found, of), value in after.items()
        if found == f"paceline:{name}" and frozenset(labels.items()) <= of
    )


def test_metrics_agree_with_a_requests_result(watched: Watched) -> None:
    before = watched.samples()
    result = watched.running.client.generate(
        f"{MARK}\ndef main():", {"max_tokens": 40, "temperature": 0, "ignore_eos": True}, timeout=HANG
    )
    after = watched.samples()

    grown = partial(growth, before, after)
    stats = result.speculative_decoding
    assert grown("request_success_total", finished_reason="length") == 1
    assert grown("prompt_tokens_total") == result.usage.prompt_tokens
    assert grown("generation_tokens_total") == 40
    assert grown("rounds_total") == stats.num_rounds
    assert grown("lookahead_hits_total") == stats.num_lookahead_hits
    assert grown("prompt_lookups_total") == stats.num_prompt_lookups
    assert grown("spec_decode_num_drafts_total") == stats.num_spec_steps
    assert grown("spec_decode_num_draft_tokens_total") == stats.num_draft_tokens
    assert grown("spec_decode_num_accepted_tokens_total") == stats.num_accepted_draft_tokens > 0
    per_position = [grown("spec_decode_num_accepted_tokens_per_pos_total", position=str(i)) for i in range(3)]
    assert sum(per_position) == stats.num_accepted_draft_tokens
    assert per_position == sorted(per_position, reverse=True)
    assert grown("round_num_draft_tokens_count") == stats.num_rounds
    assert grown("round_num_draft_tokens_sum") == stats.num_draft_tokens
    for phase in ("queue", "wire", "commit"):
        assert grown("round_phase_time_seconds_count", phase=phase) == stats.num_rounds
    assert grown("round_phase_time_seconds_count", phase="prefill") == 1
    assert grown("round_phase_time_seconds_count", phase="verify") == stats.num_rounds - 1
    drafted = grown("round_phase_time_seconds_count", phase="draft")
    assert drafted == stats.num_spec_steps - stats.num_lookahead_hits - stats.num_prompt_lookups
    assert grown("time_to_first_token_seconds_count") == 1
    assert grown("inter_token_latency_seconds_count") == 39
    decode = grown("request_decode_time_seconds_sum")
    assert grown("inter_token_latency_seconds_sum") == pytest.approx(decode)
    first = grown("time_to_first_token_seconds_sum")
    assert grown("e2e_request_latency_seconds_sum") == pytest.approx(first + decode)
    waited = grown("request_queue_time_seconds_sum") + grown("request_prefill_time_seconds_sum")
    assert waited == pytest.approx(first)
    assert grown("grpc_requests_total", method="paceline.v1.GenerationService/Generate", code="OK") == 1


COUNTING = ", ".join(map(str, range(1, 17))) + ", "
AGAIN = f"{COUNTING}{COUNTING}1, 2, 3,"
"""A prompt that goes on as it began: proposals are accepted whole, also behind a stop."""


@pytest.mark.parametrize("mode", ["coupled", "rejection", "block"])
@pytest.mark.parametrize("ends", [{"stop": ["15,"]}, {"stop": ["13,"], "min_tokens": 9}, {"max_tokens": 7}])
def test_counts_agree_over_grpc_http_and_metrics(watched: Watched, mode: str, ends: dict[str, Any]) -> None:
    """By the result over gRPC, the usage over HTTP and the metrics, for the same two requests."""
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": 60} | ends
    speculation = {"num_speculative_tokens": 8, "acceptance": mode}
    before = watched.samples()
    result = watched.running.client.generate(AGAIN, asked, speculation=speculation, timeout=HANG)
    between = watched.samples()
    body = {"prompt": AGAIN, "speculative_decoding": speculation, "include_speculative_decoding": True}
    answer = complete(watched, **asked, **body).json()
    after = watched.samples()

    told, usage = result.speculative_decoding, answer["usage"]
    origins = Counter(origin.value for origin in result.origins)
    ends_accepted = result.origins[-1] is TokenOrigin.ACCEPTED
    assert told.num_accepted_draft_tokens == origins["accepted"] > 0
    assert len(result.token_ids) == told.num_rounds + told.num_accepted_draft_tokens - ends_accepted
    plain = told.num_rounds - told.num_spec_steps
    assert origins["target"] == plain
    assert told.mean_acceptance_length * told.num_spec_steps == pytest.approx(len(result.token_ids) - plain)

    over_http, tokens = usage["speculative_decoding"], usage["completion_tokens"]
    assert tokens == len(result.token_ids)
    less = tokens - over_http["num_rounds"] - over_http["num_accepted_draft_tokens"]
    assert less in (0, -1)
    for earlier, later, counts, length in (
        (before, between, to_plain(told), len(result.token_ids)),
        (between, after, over_http, tokens),
    ):
        grown = partial(growth, earlier, later)
        assert grown("generation_tokens_total") == length
        assert grown("rounds_total") == counts["num_rounds"]
        assert grown("spec_decode_num_accepted_tokens_total") == counts["num_accepted_draft_tokens"]
        assert grown("spec_decode_num_draft_tokens_total") == counts["num_draft_tokens"]
        assert grown("spec_decode_num_drafts_total") == counts["num_spec_steps"]
        assert grown("spec_decode_num_accepted_tokens_per_pos_total") == counts["num_accepted_draft_tokens"]
    if ends == {"stop": ["15,"]}:
        assert ends_accepted, "more was accepted than the stop left"


def test_round_phases_add_up_to_the_rounds(watched: Watched) -> None:
    watched.running.good_request()
    parts = watched.total("round_phase_time_seconds_sum")
    whole = watched.total("round_time_seconds_sum")
    assert parts == pytest.approx(whole)
    assert whole > 0


def test_errors_and_refusals_are_counted(watched: Watched) -> None:
    def counts() -> tuple[float, float, float, float]:
        return (
            watched.total("request_failure_total", code="INVALID_ARGUMENT"),
            watched.total("grpc_requests_total", code="INVALID_ARGUMENT"),
            watched.total("http_requests_total", handler="/v1/completions", status="400"),
            watched.total("http_requests_total", handler="other", status="404"),
        )

    before = counts()
    with pytest.raises(InvalidArgumentError):
        watched.running.client.generate([10**6], {"max_tokens": 3}, timeout=HANG)
    assert complete(watched, temperature=-1).status_code == 400
    assert httpx2.get(f"{watched.http}/{MARK}").status_code == 404
    # The first one passed the checks that need no model, the second one did not.
    assert counts() == (before[0] + 1, before[1] + 1, before[2] + 1, before[3] + 1)


def test_metrics_show_worker_states_and_caches(watched: Watched) -> None:
    stack = watched.running.stack
    for role in ("target", "draft"):
        assert watched.total("workers", role=role, state="ready") == 1
        assert watched.total("workers", role=role) == 1
        address = stack.address_of(role)
        assert watched.total("kv_cache_blocks", role=role, worker=address) == 1024
        assert watched.total("kv_cache_usage_perc", role=role, worker=address) < 1


def test_workers_export_their_own_metrics(watched: Watched) -> None:
    watched.running.good_request()
    for role in ("target", "draft"):
        (line,) = (x for x in watched.lines() if x["role"] == role and "metrics_address" in x)
        url = f"http://{line['metrics_address']}/metrics"
        for kind in ("rounds", "ahead"):
            ran = {"role": role, "kind": kind}
            until(
                lambda url=url, ran=ran: watched.total("worker_pass_time_seconds_count", url, **ran) > 0,
                f"passes of the {role} for {kind}",
            )
        assert watched.total("worker_pass_rows_sum", url, role=role) > 0
        assert watched.total("worker_kv_cache_blocks", url) == 1024, "used and free, at one moment"
        until(lambda url=url: watched.total("worker_sequences_held", url) == 0, "no sequence held")


# ---- traces ---------------------------------------------------------------------------------------


def check_tree(spans: list[Span], request: Span) -> None:
    """The request, its rounds below it, and below each of them what the workers did for it."""
    rounds = {span.span_id: span for span in spans if span.name == "round"}
    assert all(span.parent_id == request.span_id for span in rounds.values())
    assert len(rounds) == len({span.attributes["paceline.round"] for span in rounds.values()})
    for span in spans:
        if span.name in ("draft", "verify"):
            parent = rounds[span.parent_id]
            assert span.attributes["paceline.round"] == parent.attributes["paceline.round"]
            assert span.attributes["paceline.sequence_id"] == parent.attributes["paceline.sequence_id"]
            assert span.start >= parent.start - CLOCKS
            # Of a proposal that was foreseen the draft may tell when all is over, and so may the target of a
            # round that it had begun by itself.
            late = not is_committed(parent) or (span.name == "draft" and not waited_for_draft(parent))
            assert span.end <= request.end or late
        assert span.start <= span.end
        assert request.start - CLOCKS <= span.start
    for span in rounds.values():
        assert span.end <= request.end
        below = Counter(each.name for each in spans if each.parent_id == span.span_id)
        assert below["verify"] == 1 or (below["verify"] == 0 and not is_committed(span))
        assert below["draft"] <= 1


def test_a_request_is_one_trace_in_three_processes(watched: Watched) -> None:
    trace, caller = f"{0x1234ABCD:032x}", f"{0x77:016x}"
    answer = complete(
        watched, include_speculative_decoding=True, headers={"traceparent": f"00-{trace}-{caller}-01"}
    )
    assert answer.status_code == 200
    stats = answer.json()["usage"]["speculative_decoding"]
    spans = watched.trace(trace, stats["num_rounds"])
    assert {span.service for span in spans} == SERVICES
    (request,) = (span for span in spans if span.name.startswith("text_completion"))
    assert request.parent_id == caller
    check_tree(spans, request)
    about = request.attributes
    assert about["gen_ai.request.model"] == answer.json()["model"]
    assert about["gen_ai.usage.input_tokens"] == answer.json()["usage"]["prompt_tokens"]
    assert about["gen_ai.usage.output_tokens"] == 24
    assert about["gen_ai.response.finish_reasons"] == ["length"]
    assert about["gen_ai.request.max_tokens"] == 24
    rounds = [span for span in spans if is_committed(span)]
    assert sum(span.attributes["paceline.num_draft_tokens"] for span in rounds) == stats["num_draft_tokens"]
    accepted = sum(span.attributes["paceline.num_accepted_tokens"] for span in rounds)
    assert accepted == stats["num_accepted_draft_tokens"]
    assert sum(span.attributes["paceline.lookahead_hit"] for span in rounds) == stats["num_lookahead_hits"]
    assert sum(span.attributes["paceline.prompt_lookup"] for span in rounds) == stats["num_prompt_lookups"]
    (line,) = until(lambda: watched.calls(trace_id=trace), "the call's line")
    assert line["request_id"] == answer.headers.get("x-request-id", answer.json()["id"])


def test_workers_spans_belong_to_sent_rounds(watched: Watched) -> None:
    """Without a draft the target goes on by itself, and knows of no stop string."""
    trace = f"{0xE4D0:032x}"
    nobody = {"num_speculative_tokens": 0}
    parent = {"traceparent": f"00-{trace}-{1:016x}-01"}
    asked: dict[str, Any] = {
        "prompt": AGAIN,
        "stop": ["15,"],
        "speculative_decoding": nobody,
        "headers": parent,
    }
    tokens = complete(watched, **asked).json()["usage"]["completion_tokens"]
    spans = watched.trace(trace, tokens)
    (request,) = (span for span in spans if span.name.startswith("text_completion"))
    check_tree(spans, request)
    assert sum(span.name == "round" for span in spans) == tokens + 1


def test_grpc_metadata_carries_the_trace(watched: Watched) -> None:
    caller = TraceParent(0xFEED, 0xBEEF, True)
    request = pb.GenerateRequest(text=f"{MARK} def f():", sampling=SIX)
    with watched.running.stub() as stub:
        *_, last = stub.Generate(request, metadata=[("traceparent", str(caller))], timeout=HANG)
    rounds = last.finished.speculative_decoding.num_rounds
    spans = watched.trace(f"{0xFEED:032x}", rounds)
    (request_span,) = (span for span in spans if span.name.startswith("text_completion"))
    assert request_span.parent_id == f"{0xBEEF:016x}"
    check_tree(spans, request_span)


def test_choices_share_a_trace_with_separate_rounds(watched: Watched) -> None:
    trace = f"{0xC401CE:032x}"
    answer = complete(
        watched,
        n=3,
        temperature=1,
        include_speculative_decoding=True,
        headers={"traceparent": f"00-{trace}-{1:016x}-01"},
    )
    spans = watched.trace(trace, answer.json()["usage"]["speculative_decoding"]["num_rounds"])
    rounds = [span for span in spans if span.name == "round"]
    assert {span.attributes["paceline.choice"] for span in rounds} == {0, 1, 2}
    assert len({span.span_id for span in rounds}) == len(rounds)


def test_an_unsampled_request_makes_no_span(watched: Watched) -> None:
    quiet, loud = f"{0xDEAD:032x}", f"{0xA11FE:032x}"
    complete(watched, headers={"traceparent": f"00-{quiet}-{1:016x}-00"})
    complete(watched, max_tokens=1, headers={"traceparent": f"00-{loud}-{1:016x}-01"})
    watched.trace(loud, 1)  # what came before it has been sent
    assert watched.collector.of_trace(quiet) == []


def test_a_refused_requests_span_has_its_code(watched: Watched) -> None:
    trace = f"{0xBAD:032x}"
    answer = complete(watched, prompt=[10**6], headers={"traceparent": f"00-{trace}-{1:016x}-01"})
    assert answer.status_code == 400
    (span,) = until(lambda: watched.collector.of_trace(trace), "the span of a refusal")
    assert span.is_error
    assert span.attributes["error.type"] == "INVALID_ARGUMENT"


def test_ratio_zero_traces_only_sampled_requests(watched: Watched, pair_paths: Pair) -> None:
    workers = [watched.running.stack.address_of(role) for role in ("target", "draft")]
    with own_coordinator(
        pair_paths,
        workers[:1],
        workers[1:],
        model_name="seldom",
        otlp_traces_endpoint=watched.collector.endpoint,
        otlp_traces_sampling_ratio=0.0,
    ) as own:
        url = f"http://{own.supervisor.status('coordinator').http_address}/v1/completions"
        for traceparent in ("", "nonsense", f"00-{0x5E1D:032x}-{1:016x}-01"):
            headers = {"traceparent": traceparent} if traceparent else {}
            body = {"prompt": MARK, "max_tokens": 2}
            assert httpx2.post(url, json=body, headers=headers, timeout=HANG).status_code == 200
        # The last request's: what the others had would be sent before it.
        until(lambda: watched.collector.named("text_completion seldom"), "the span of the sampled request")
    of_it = watched.collector.named("text_completion seldom")
    assert [span.trace_id for span in of_it] == [f"{0x5E1D:032x}"]


# ---- log lines ------------------------------------------------------------------------------------


def test_every_log_line_is_json_with_the_standard_fields(watched: Watched) -> None:
    # What gRPC's C library writes by itself is wrapped by `paceline serve` (below).
    lines = [line for line in watched.running.log.lines if not C_LINE.search(line)]
    assert lines
    for line in lines:
        role, _, text = line.partition("] ")
        told = json.loads(text)
        assert {"time", "level", "role", "logger", "message"} <= told.keys()
        assert told["role"] == role.removeprefix("[")


def test_an_http_call_logs_one_line_at_its_end(watched: Watched) -> None:
    answer = complete(watched, stream=True, stream_options={"include_usage": True})
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    usage, request_id = events[-1]["usage"], events[-1]["id"]
    (line,) = until(lambda: watched.calls(request_id=request_id), "the line of a call")
    assert line["face"] == "http"
    assert line["method"] == "POST /v1/completions"
    assert line["code"] == "200"
    assert line["prompt_tokens"] == usage["prompt_tokens"]
    assert line["completion_tokens"] == usage["completion_tokens"] == 24
    assert line["finish_reason"] == ["length"]
    assert 0 <= line["queue_s"] <= line["first_token_s"] <= line["duration_s"]
    assert line["num_rounds"] > 0
    assert line["model"] == events[-1]["model"]


def test_a_grpc_call_logs_one_line_at_its_end(watched: Watched) -> None:
    request = pb.GenerateRequest(
        text=f"{MARK} def f():", sampling={"max_tokens": 5, "ignore_eos": True}, request_id="by-hand"
    )
    with watched.running.stub() as stub:
        list(stub.Generate(request, timeout=HANG))
        bad = pb.GenerateRequest(token_ids={"ids": [10**6]}, request_id="by-hand-2")
        with contextlib.suppress(grpc.RpcError):
            list(stub.Generate(bad, timeout=HANG))
    (good,) = until(lambda: watched.calls(request_id="by-hand"), "the line of a call")
    assert (good["code"], good["completion_tokens"]) == ("OK", 5)
    (refused,) = until(lambda: watched.calls(code="INVALID_ARGUMENT", face="grpc"), "a refusal's line")[-1:]
    assert refused["error"] == "INVALID_ARGUMENT"


def test_a_client_that_leaves_is_logged_as_cancelled(watched: Watched) -> None:
    request = pb.GenerateRequest(
        text=f"{MARK} def f():", sampling={"max_tokens": 1500, "ignore_eos": True}, request_id="leaver"
    )
    before = watched.total("request_success_total", finished_reason="abort")
    with watched.running.stub() as stub:
        stream = stub.Generate(request, timeout=HANG)
        next(stream)
        next(stream)
        stream.cancel()
    (line,) = until(lambda: watched.calls(request_id="leaver"), "the line of a call")
    assert (line["code"], line["finish_reason"]) == ("CANCELLED", ["abort"])
    assert watched.total("request_success_total", finished_reason="abort") == before + 1


def test_logs_and_spans_hold_no_prompt_or_output(watched: Watched) -> None:
    """Marked requests that succeed, are refused, fail or are left, over gRPC and HTTP."""
    client, word = watched.running.client, "xylophone"
    told = complete(watched, prompt=f"{MARK} " * 3, echo=True, stop=[MARK], logprobs=2)
    assert told.status_code == 200
    assert MARK in told.text
    output = client.generate(MARK, {"max_tokens": 40, "ignore_eos": True, "seed": 5}, timeout=HANG).text
    chat = {"messages": [{"role": "user", "content": MARK}]}
    for path, body in (
        ("/v1/completions", {"prompt": MARK, "max_tokens": -1}),
        ("/v1/completions", {"prompt": MARK, "model": MARK}),
        ("/v1/completions", {"prompt": MARK, "user": MARK, "bad_words": [MARK * 100]}),
        ("/v1/completions", {"prompt": {MARK: MARK}}),
        ("/v1/completions", {"prompt": f"{MARK} " * 5000, "max_tokens": 5}),
        ("/v1/chat/completions", chat | {"chat_template_kwargs": {MARK: MARK}}),
        ("/tokenize", {"prompt": MARK, MARK: MARK}),
        ("/tokenize", {"prompt": MARK}),
        (f"/{MARK}", {}),
    ):
        httpx2.post(watched.http + path, json=body, timeout=HANG)
    httpx2.post(f"{watched.http}/v1/completions?prompt={MARK}", content=MARK.encode(), timeout=HANG)
    httpx2.get(f"{watched.http}/v1/models/{MARK}", timeout=HANG)
    with watched.running.stub() as stub, contextlib.suppress(grpc.RpcError):
        list(
            stub.Generate(pb.GenerateRequest(text=MARK, sampling={"top_p": 7}, request_id="x"), timeout=HANG)
        )
    with grpc.insecure_channel(watched.running.address) as channel, contextlib.suppress(grpc.RpcError):
        raw = channel.unary_unary("/paceline.v1.GenerationService/Generate")
        raw(MARK.encode(), timeout=HANG)
    marked = f"{0x3A4BED:032x}"
    complete(watched, headers={"traceparent": f"00-{marked}-{1:016x}-01"}, max_tokens=1)
    watched.trace(marked, 1)  # everything before it has been sent
    logs = "\n".join(watched.running.log.lines)
    piece = max(output.split(), key=len)
    assert len(piece) >= 4
    for text in (word, "quagmire", piece):
        assert text not in logs
        assert not any(text.encode() in message for message in watched.collector.raw)
    watched.running.check_pools_whole()
