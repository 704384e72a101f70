"""Counts by tenant, and tenants' names in metrics and spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import generate_latest

from coordinator.api.http.metrics import make_registry
from coordinator.app import Coordinator
from coordinator.auth import Principal, principal
from coordinator.requests.observer import RequestRecord
from coordinator.sequence.round_record import RoundRecord
from coordinator.telemetry import call_log
from coordinator.telemetry.call_log import Call
from coordinator.telemetry.request_log import Reporting
from coordinator.telemetry.tenants import TenantMetrics
from coordinator.telemetry.tracing import Tracer
from coordinator.text.vocabulary import Vocabulary
from paceline.core.clock import ManualClock
from paceline.core.config import CoordinatorConfig
from paceline.core.errors import InvalidArgumentError, StaleEpochError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.rpc.codec.generation import GenerateCall

CALL = GenerateCall("id", (1, 2), SamplingParams(), SpeculationParams(), "")


def running(tenant: str, *, begun: bool) -> Any:
    ledger = SimpleNamespace(prompt_length=7)
    return SimpleNamespace(
        tenant=tenant, last_token_at=1.0 if begun else None, state=SimpleNamespace(ledger=ledger)
    )


def request(tenant: str, error: Any = None) -> RequestRecord:
    return RequestRecord(CALL, "m", 0.0, tenant=tenant, error=error)


def test_requests_and_tokens_are_counted_by_tenant() -> None:
    of = TenantMetrics()
    of.round_ended(running("alice", begun=False), RoundRecord(num_tokens=1), 0.0)
    of.round_ended(running("alice", begun=True), RoundRecord(num_tokens=4), 0.0)
    of.round_ended(running("bob", begun=False), RoundRecord(num_tokens=2), 0.0)
    of.request_ended(request("alice"))
    of.request_ended(request("alice", InvalidArgumentError("n", "no")))
    of.request_ended(request("alice", StaleEpochError("resumed")))
    assert of.prompt_tokens == {"alice": 7, "bob": 7}
    assert of.generation_tokens == {"alice": 5, "bob": 2}
    assert of.requests == {("alice", "OK"): 1, ("alice", "INVALID_ARGUMENT"): 1}


@pytest.mark.parametrize("wanted", [False, True])
def test_metrics_name_tenants_only_when_enabled(wanted: bool) -> None:
    config = CoordinatorConfig(targets=("t:1",), tokenizer="embedded:target", tenant_metrics=wanted)
    coordinator = Coordinator(config, Vocabulary.load(config.tokenizer))
    for observer in coordinator._reporting._observers:
        observer.request_ended(request("alice"))
    text = generate_latest(make_registry(coordinator)).decode()
    line = 'paceline:tenant_requests_total{code="OK",model_name="",tenant="alice"} 1.0'
    assert (line in text.splitlines()) is wanted
    assert ("alice" in text) is wanted


class KeptSpans:
    """Keeps what the spans of requests say."""

    def __init__(self) -> None:
        self.attributes: list[Any] = []
        self.parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"

    def begin(self, name: str, parent: Any, began: float) -> KeptSpans:
        return self

    def end(self, ended: float, attributes: Any, error: str = "") -> None:
        self.attributes.append(attributes)


def test_spans_name_the_tenant_and_given_id() -> None:
    spans: Any = KeptSpans()
    reporting = Reporting([Tracer(spans)], ManualClock())
    caller = principal.set(Principal("alice"))
    try:
        with call_log.taking(Call("http", "POST", 0.0, given_id="front-1")), reporting.observed(CALL, "m"):
            pass
    finally:
        principal.reset(caller)
    with call_log.taking(Call("http", "POST", 0.0)), reporting.observed(CALL, "m"):
        pass
    named, other = spans.attributes
    assert named["paceline.tenant"] == "alice"
    assert named["paceline.request_id"] == "front-1"
    assert not {"paceline.tenant", "paceline.request_id"} & other.keys()
