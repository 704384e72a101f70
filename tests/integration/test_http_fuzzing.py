"""Requests made from the OpenAPI document, good and bad ones, against real processes: no 500 and no hang."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest
import schemathesis
from harness.pair import Pair
from harness.stacks import RunningStack, own_coordinator
from harness.waiting import HANG
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import Case, GenerationMode
from schemathesis.checks import (
    content_type_conformance,
    not_a_server_error,
    response_schema_conformance,
    status_code_conformance,
)

EXAMPLES = 60
TEMPLATE = "{% for m in messages %}{{ m.role }} {{ m.name }}: {{ m.content }}\n{% endfor %}"
CHECKS: list[Any] = [
    not_a_server_error,
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
]
OPERATIONS = [
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/v1/models/{model}"),
    ("GET", "/v1/models"),
    ("GET", "/health"),
    ("GET", "/ping"),
    ("POST", "/ping"),
    ("GET", "/version"),
    ("GET", "/metrics"),
]
WITH_BODIES = [path for method, path in OPERATIONS if method == "POST" and path != "/ping"]
AT_MOST = {"n": 2, "best_of": 2, "max_tokens": 4, "max_completion_tokens": 4}
"""Valid requests may ask for much; that is no fault of theirs."""


@pytest.fixture(scope="module")
def url(stack: RunningStack, pair_paths: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A face that can chat."""
    file = tmp_path_factory.mktemp("template") / "chat.jinja"
    file.write_text(TEMPLATE)
    workers = [stack.stack.address_of(role) for role in ("target", "draft")]
    with own_coordinator(pair_paths, workers[:1], workers[1:], chat_template=str(file)) as own:
        yield f"http://{own.supervisor.status('coordinator').http_address}"
        status = own.client.status().coordinator
        assert (status.running, status.waiting) == (0, 0)
        assert not [line for line in own.log.lines if "Traceback" in line]
    stack.check_pools_whole()


@pytest.fixture(scope="module")
def document(url: str) -> Any:
    return schemathesis.openapi.from_url(f"{url}/openapi.json")


def modest(body: Any, *, chat: bool) -> Any:
    """The same request for few tokens, where it is one."""
    if not isinstance(body, dict):
        return body
    changed = {name: value for name, value in body.items() if name != "model" or not isinstance(value, str)}
    for name, bound in AT_MOST.items():
        value = body.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > bound:
            changed[name] = bound
    if chat and not any(body.get(name) for name in ("max_tokens", "max_completion_tokens")):
        changed["max_tokens"] = 4
    return changed


def test_every_documented_operation_is_fuzzed(document: Any) -> None:
    told = {(o.ok().method.upper(), o.ok().path) for o in document.get_all_operations()}
    assert told == set(OPERATIONS)


@pytest.mark.parametrize(
    ("method", "path", "mode"),
    [
        (method, path, mode)
        for method, path in OPERATIONS
        for mode in GenerationMode
        if path in WITH_BODIES or mode is GenerationMode.POSITIVE
    ],
)
def test_no_request_breaks_the_server(
    method: str, path: str, mode: GenerationMode, document: Any, url: str
) -> None:
    operation = document[path][method]
    seen: Counter[int] = Counter()

    @settings(
        max_examples=EXAMPLES if method == "POST" else 5,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def call(case: Case) -> None:
        case.body = modest(case.body, chat="chat" in path)
        response = case.call(base_url=url, timeout=HANG)
        seen[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)

    call()
    if mode is GenerationMode.POSITIVE and path != "/v1/models/{model}":
        assert seen[200], f"no request was good enough to be served: {seen}"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=150, deadline=None, database=None, suppress_health_check=list(HealthCheck))
@given(path=st.sampled_from([*WITH_BODIES, "/ping"]), data=st.data())
def test_no_bytes_break_the_server(url: str, path: str, data: st.DataObject) -> None:
    """Also what no schema would make: bytes that are no JSON, and values anywhere."""
    least = {"prompt": "x", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}], "tokens": [1]}
    raw = data.draw(
        st.binary(max_size=200)
        | json_values.map(lambda value: json.dumps(value).encode())
        | st.tuples(st.sampled_from([*least, "stop", "logit_bias", "n", "seed", "user"]), json_values).map(
            lambda pair: json.dumps(least | {pair[0]: pair[1]}).encode()
        )
    )
    answer = httpx2.post(url + path, content=raw, timeout=HANG)
    assert answer.status_code < 500
    if answer.status_code != 200:
        assert set(answer.json()["error"]) == {"message", "type", "param", "code"}
