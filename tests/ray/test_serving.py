"""Paceline on Ray Serve: three ways in, each with the tokens of `paceline serve`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import openai
import pytest
import yaml
from harness.waiting import HANG

from paceline.client import Client
from paceline.core.errors import InvalidArgumentError

if TYPE_CHECKING:
    from harness.continuous import Case
    from harness.ray_cluster import RayApp

pytestmark = pytest.mark.timeout(300)


def check(client: Client, case: Case) -> None:
    """The tokens are those of `paceline serve`, and some were drafted."""
    result = client.generate(case.prompt, dict(case.sampling), timeout=HANG)
    assert list(result.token_ids) == list(case.expected)
    assert result.speculative_decoding.num_draft_tokens > 0


@pytest.mark.parametrize("way", ["proxy", "own port"])
def test_grpc_gives_the_tokens_of_paceline_serve(app: RayApp, cases: list[Case], way: str) -> None:
    (own,) = app.coordinators(1)
    with Client(app.proxy if way == "proxy" else own) as client:
        for case in cases:
            check(client, case)


def test_http_gives_the_tokens_of_paceline_serve(app: RayApp, cases: list[Case]) -> None:
    (model,) = httpx2.get(f"{app.http_url}/v1/models", timeout=HANG).json()["data"]
    for case in cases:
        body = {"model": model["id"], "prompt": list(case.prompt), **case.sampling, "return_token_ids": True}
        answer = httpx2.post(f"{app.http_url}/v1/completions", json=body, timeout=HANG).json()
        assert answer["choices"][0]["token_ids"] == list(case.expected)


def test_http_streams(app: RayApp, cases: list[Case]) -> None:
    with openai.OpenAI(base_url=f"{app.http_url}/v1", api_key="none", timeout=HANG) as client:
        (model,) = client.models.list().data
        chunks = [
            chunk.choices[0].text
            for chunk in client.completions.create(
                model=model.id, prompt="def main():", max_tokens=40, temperature=0, stream=True
            )
        ]
    with Client(app.proxy) as own:
        whole = own.generate("def main():", {"max_tokens": 40, "temperature": 0}, timeout=HANG)
    assert len(chunks) > 1
    assert "".join(chunks) == whole.text


def test_errors_through_the_proxy_name_their_field(app: RayApp) -> None:
    """In a stream and in a single answer; an exception would lose its details there."""
    with Client(app.proxy) as client:
        with pytest.raises(InvalidArgumentError) as raised:
            client.generate([1] * 100_000, timeout=HANG)
        assert raised.value.field == "prompt"
        with pytest.raises(InvalidArgumentError) as raised:
            client.detokenize([2**31], timeout=HANG)
        assert raised.value.field == "token_ids"


def test_serve_status_shows_the_deployments(app: RayApp) -> None:
    status = yaml.safe_load(app.cluster.serve("status", "--address", app.cluster.dashboard))
    deployments = status["applications"]["paceline"]["deployments"]
    assert {name: each["status"] for name, each in deployments.items()} == dict.fromkeys(
        ("TargetWorker", "DraftWorker", "Coordinator"), "HEALTHY"
    )
