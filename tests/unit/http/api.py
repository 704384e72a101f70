"""Requests to the HTTP face, and scripts of what a coordinator emits for them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2
import orjson
import pytest

from coordinator.api.chat_template import ChatTemplate
from coordinator.api.http.app import make_app
from coordinator.api.http.openai.schema.bodies import ChatRequest, CompletionRequest
from coordinator.sequence.ledger import Commit, Finish
from paceline.core.types import FinishReason, TokenOrigin
from paceline.rpc.codec import GenerateCall

HANG = 30.0
MAX_MODEL_LEN = 2048
"""Of the scripted coordinator."""
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "def main():"}]
LEAST: dict[Any, dict[str, Any]] = {COMPLETIONS: {"prompt": "def main():"}, CHATS: {"messages": MESSAGES}}
"""What a request must have, by path."""
both_paths = pytest.mark.parametrize("path", LEAST)
both_models = pytest.mark.parametrize(
    ("model", "least"), [(CompletionRequest, LEAST[COMPLETIONS]), (ChatRequest, LEAST[CHATS])]
)
TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}{% if add_generation_prompt %}[a]{% endif %}"
Script = Callable[[GenerateCall], AsyncIterator[Commit]]


def commit(index: int, text: str, finish: FinishReason | None = None, choice: int = 0, **more: Any) -> Commit:
    """One token's worth of text."""
    end = None if finish is None else Finish(finish)
    return Commit(index, (5,), (TokenOrigin.TARGET,), text, end, choice, **more)


def script(*parts: Commit, error: Exception | None = None) -> Script:
    """Emits these for every call, and then fails if there is an error."""

    async def emitting(_: GenerateCall) -> AsyncIterator[Commit]:
        for part in parts:
            yield part
        if error is not None:
            raise error

    return emitting


class Api(httpx2.AsyncClient):
    """A client of the whole application, in process; a defect is answered with 500, not raised here."""

    def __init__(self, coordinator: Any, template: str | None = TEMPLATE, **more: Any) -> None:
        headers = more.pop("headers", None)
        app = make_app(coordinator, None if template is None else ChatTemplate(template), **more)
        transport = httpx2.ASGITransport(app, raise_app_exceptions=False)
        super().__init__(transport=transport, base_url="http://test", headers=headers)

    async def ask(self, path: str = COMPLETIONS, **values: Any) -> httpx2.Response:
        return await self.post(path, json=LEAST.get(path, {}) | values)

    async def answer(self, path: str = COMPLETIONS, **values: Any) -> Any:
        """The object of an answer with status 200."""
        answer = await self.ask(path, **values)
        assert answer.status_code == 200, answer.text
        return answer.json()

    async def choice(self, path: str = COMPLETIONS, **values: Any) -> Any:
        """The only choice of an answer."""
        (choice,) = (await self.answer(path, **values))["choices"]
        return choice

    async def refusal(self, path: str = COMPLETIONS, *, status: int = 400, **values: Any) -> Any:
        """The error of a refused request."""
        answer = await self.ask(path, **values)
        assert answer.status_code == status, answer.text
        return answer.json()["error"]

    async def stream(self, path: str = COMPLETIONS, **values: Any) -> list[Any]:
        """The events of a streamed answer, up to an error or [DONE], which is left out."""
        answer = await self.ask(path, **values, stream=True)
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        blocks = answer.text.split("\n\n")
        assert blocks.pop() == ""
        assert all(block.startswith("data: ") for block in blocks)
        done = blocks[-1] == "data: [DONE]"
        events = [orjson.loads(block[6:]) for block in (blocks[:-1] if done else blocks)]
        assert done is ("error" not in events[-1])
        return events


@dataclass
class Exchange:
    """One request to an ASGI application, by hand: the client leaves when `leave` is set."""

    sent: list[Any] = field(default_factory=list)
    leave: asyncio.Event = field(default_factory=asyncio.Event)
    body: list[bytes] = field(default_factory=list)

    async def receive(self) -> Any:
        if self.body:
            return {"type": "http.request", "body": self.body.pop(), "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)

    def begin(self, coordinator: Any, **values: Any) -> asyncio.Task[None]:
        """Ask the application for a completion."""
        self.body.append(orjson.dumps({"prompt": "x"} | values))
        scope = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": [], "query_string": b""}
        return asyncio.create_task(make_app(coordinator, None)(scope, self.receive, self.send))
