"""`paceline chat`: the remembered conversation, and the ends of replies and of the command."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from harness.commands import command

from paceline.core.errors import InvalidArgumentError, UnavailableError

CUT = object()
"""In a script: the user presses Ctrl-C here."""


class FakeStream:
    """Plays what a test wrote: texts, errors, and Ctrl-C."""

    def __init__(self, script: Iterator[Any]) -> None:
        self._script = script

    async def __aenter__(self) -> FakeStream:
        return self

    async def __aexit__(self, *_: Any) -> None:
        pass

    def __aiter__(self) -> FakeStream:
        return self

    async def __anext__(self) -> Any:
        part = next(self._script, None)
        if part is None:
            raise StopAsyncIteration
        if isinstance(part, Exception):
            raise part
        if part is CUT:
            task = asyncio.current_task()
            task.cancel()  # as asyncio does for a SIGINT
            await asyncio.Event().wait()
        return type("Chunk", (), {"text": part})


class FakeClient:
    """Replies that a test wrote, one a turn."""

    refusal: Exception | None = None
    replies: list[list[Any]] = []  # noqa: RUF012 - set by each test
    seen: list[Any] = []  # noqa: RUF012
    options: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, address: str, **_: Any) -> None:
        self._replies = iter(self.replies)
        self.closed = False

    async def apply_chat_template(self, messages: Any) -> tuple[int, ...]:
        if self.refusal is not None:
            raise self.refusal
        return (1,)

    async def stream_chat(self, messages: Any, sampling: Any, **options: Any) -> FakeStream:
        self.seen.append([(message["role"], message["content"]) for message in messages])
        self.options.update(options, sampling=sampling)
        return FakeStream(iter(next(self._replies)))

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> type[FakeClient]:
    class Client(FakeClient):
        seen: list[Any] = []  # noqa: RUF012
        options: dict[str, Any] = {}  # noqa: RUF012

    monkeypatch.setattr("paceline.cli.connecting.AsyncClient", Client)
    return Client


def test_each_line_is_sent_with_the_conversation(fake: type[FakeClient]) -> None:
    fake.replies = [["he", "llo"], ["bye"]]
    done = command("chat", "--system", "be kind", "--seed", "3", stdin="hi\n\n  \nmore\n")
    assert (done.returncode, done.stdout, done.stderr) == (0, "hello\nbye\n", "")
    system = ("system", "be kind")
    assert fake.seen == [
        [system, ("user", "hi")],
        [system, ("user", "hi"), ("assistant", "hello"), ("user", "more")],
    ]
    assert fake.options["sampling"].seed == 3
    assert fake.options["sampling"].max_tokens is None


def test_ctrl_c_ends_a_reply_and_keeps_its_text(fake: type[FakeClient]) -> None:
    fake.replies = [["hel", CUT], [CUT], ["bye"]]
    done = command("chat", stdin="one\ntwo\nthree\n")
    assert (done.returncode, done.stdout) == (0, "hel\n\nbye\n")
    assert fake.seen[-1] == [("user", "one"), ("assistant", "hel"), ("user", "three")]


def test_a_message_without_a_reply_is_forgotten(fake: type[FakeClient]) -> None:
    fake.replies = [[UnavailableError("away")], ["hello"]]
    done = command("chat", stdin="one\ntwo\n")
    assert (done.returncode, done.stdout) == (1, "\nhello\n")
    assert done.stderr.startswith("error: away")
    assert fake.seen == [[("user", "one")], [("user", "two")]]


def test_a_missing_chat_template_is_reported_at_once(fake: type[FakeClient]) -> None:
    fake.refusal = InvalidArgumentError("messages", "start the coordinator with --chat-template FILE")
    done = command("chat", stdin="hi\n")
    assert done.returncode == 2
    assert "--chat-template FILE" in done.stderr
    assert fake.seen == []


@pytest.mark.parametrize(
    ("words", "name"), [(["--n", "2"], "n"), (["--echo"], "echo"), (["--logprobs", "1"], "logprobs")]
)
def test_unsuitable_chat_options_are_named(words: list[str], name: str) -> None:
    done = command("chat", *words)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: --{name}: ")
