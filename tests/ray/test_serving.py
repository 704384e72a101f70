"""Paceline on Ray Serve: three ways in, and what happens when replicas, workers and nodes come and go."""

from __future__ import annotations

from typing import TYPE_CHECKING

import httpx2
import pytest
from harness.waiting import HANG

from paceline.client import Client

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
    with Client(app.proxy if way == "proxy" else app.own_address()) as client:
        for case in cases:
            check(client, case)


def test_http_gives_the_tokens_of_paceline_serve(app: RayApp, cases: list[Case]) -> None:
    (model,) = httpx2.get(f"{app.http_url}/v1/models", timeout=HANG).json()["data"]
    for case in cases:
        body = {"model": model["id"], "prompt": list(case.prompt), **case.sampling, "return_token_ids": True}
        answer = httpx2.post(f"{app.http_url}/v1/completions", json=body, timeout=HANG).json()
        assert answer["choices"][0]["token_ids"] == list(case.expected)
