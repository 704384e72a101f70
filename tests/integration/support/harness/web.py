"""HTTP of a stack, and OpenAI's own client of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx2
import openai

from harness.waiting import HANG


@dataclass(frozen=True)
class Http:
    """Where the face is, and OpenAI's client of it."""

    url: str
    model: str
    openai: openai.OpenAI

    def get(self, path: str) -> httpx2.Response:
        return httpx2.get(self.url + path, timeout=HANG)

    def post(self, path: str, values: Any) -> httpx2.Response:
        return httpx2.post(self.url + path, json=values, timeout=HANG)

    def complete(self, prompt: Any = "def main():", **values: Any) -> Any:
        """A completion by OpenAI's client."""
        return self.openai.completions.create(model=self.model, prompt=prompt, **values)

    def chat(self, messages: Any, **values: Any) -> Any:
        """A chat completion by OpenAI's client."""
        return self.openai.chat.completions.create(model=self.model, messages=messages, **values)

    def total(self, metric: str, label: str = "") -> float:
        """The sum of a metric's samples with this label; without one, whatever their labels."""
        lines = self.get("/metrics").text.splitlines()
        found = (line for line in lines if line.startswith(f"{metric}{{") and label in line)
        return sum(float(line.rpartition(" ")[2]) for line in found)


def connect(address: str) -> Iterator[Http]:
    url = f"http://{address}"
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=HANG, max_retries=0) as client:
        (model,) = client.models.list().data
        yield Http(url, model.id, client)
