"""Callers with and without a key at the ports for clients: others are served, and memory stays bounded."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import pytest
from harness.refusals import ends_with
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator
from harness.waiting import HANG

from paceline.client import AsyncClient
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import write_keys
from paceline.core.security.keys import ApiKey, KeyRing, digest
from tests.fault.bombs.lists import LISTS
from tests.fault.bombs.texts import text_of
from tests.fault.streams import memory
from tests.unit.rpc.raw_http2 import Connection, connect

TOKEN = "pk_edge_0123456789abcdef01"
PROMPT = [5, 6, 7]
GIB = 1024**3
CHECK = b"/grpc.health.v1.Health/Check"
GENERATE = "/paceline.v1.GenerationService/Generate"


@pytest.fixture
def guarded(faulty: RunningStack, tmp_path: Path) -> Iterator[OwnCoordinator]:
    """A coordinator that asks for a key."""
    file = tmp_path / "keys.json"
    write_keys(file, KeyRing([ApiKey(name="edge", sha256=digest(TOKEN))]))
    target = faulty.stack.address_of("target")
    with own_coordinator(faulty.pair, [target], api_keys=str(file)) as own:
        yield own


def pid_of(own: OwnCoordinator) -> int:
    return own.supervisor.status("coordinator").pid


@contextlib.asynccontextmanager
async def raw(address: str, number: int) -> AsyncIterator[list[Connection]]:
    connections = [await connect(address) for _ in range(number)]
    try:
        yield connections
    finally:
        await asyncio.gather(*(each.close() for each in connections))


async def answered(client: AsyncClient) -> None:
    result = await client.generate(PROMPT, {"max_tokens": 3, "ignore_eos": True}, timeout=HANG)
    assert len(result.token_ids) == 3


async def test_idle_connections_do_not_block_clients(guarded: OwnCoordinator) -> None:
    """200 connections of callers without a key."""
    before = memory(pid_of(guarded))
    async with raw(guarded.address, 200) as idle, AsyncClient(guarded.address, api_key=TOKEN) as client:
        await answered(client)
        assert not any(each.gone for each in idle)
    assert memory(pid_of(guarded), "VmHWM") - before < GIB // 4


async def test_half_messages_without_a_key_are_bounded(guarded: OwnCoordinator) -> None:
    """32 connections, each with 80 unfinished messages of 1 MiB, while calls are answered."""
    pid = pid_of(guarded)
    before = memory(pid)

    async def attack(connection: Connection) -> None:
        for _ in range(80):
            stream = connection.begin(CHECK)
            head = b"\x00" + (15 * 2**20).to_bytes(4, "big")
            await connection.send(stream, head + b"x" * 2**20)

    async with raw(guarded.address, 32) as connections, AsyncClient(guarded.address, api_key=TOKEN) as client:
        attacks = asyncio.gather(*(attack(each) for each in connections))
        calls = 0
        while not attacks.done() or calls < 5:
            await answered(client)
            async with grpc.aio.insecure_channel(guarded.address) as channel:
                await channel.unary_unary(CHECK.decode())(b"", timeout=HANG)
            calls += 1
        await attacks
    assert memory(pid, "VmHWM") - before < GIB


@pytest.mark.parametrize("name", LISTS)
async def test_a_huge_list_is_refused(faulty: RunningStack, name: str) -> None:
    """Another tenant's stream goes on."""
    pid = faulty.stack.pid("coordinator")
    before = memory(pid)
    unbounded = [("grpc.max_send_message_length", -1)]
    async with (
        AsyncClient(faulty.address) as client,
        grpc.aio.insecure_channel(faulty.address, options=unbounded) as channel,
    ):
        stream = client.stream(PROMPT, {"max_tokens": 300, "ignore_eos": True, "seed": 1}, timeout=HANG)
        await anext(aiter(stream))
        for compression in (grpc.Compression.NoCompression, grpc.Compression.Gzip):
            call: Any = channel.unary_stream(GENERATE)(LISTS[name], timeout=HANG, compression=compression)
            with ends_with(grpc.StatusCode.INVALID_ARGUMENT):
                await call.read()
        tokens = [token async for chunk in stream for token in chunk.token_ids]
        assert tokens
    assert faulty.stack.pid("coordinator") == pid
    assert memory(pid, "VmHWM") - before < GIB


async def test_a_text_with_too_many_tokens_is_refused(faulty: RunningStack) -> None:
    """Over both ports, compressed and not, while a stream goes on."""
    pid = faulty.stack.pid("coordinator")
    before = memory(pid)
    text = text_of("zero-width joiners", 2**20)
    async with AsyncClient(faulty.address) as client:
        stream = client.stream(PROMPT, {"max_tokens": 300, "ignore_eos": True, "seed": 1}, timeout=HANG)
        await anext(aiter(stream))
        for ask in (client.tokenize(text), client.generate(text, {"max_tokens": 1}, timeout=HANG)):
            with pytest.raises(InvalidArgumentError):
                await ask
        async with httpx2.AsyncClient(base_url=f"http://{faulty.stack.http_address}", timeout=HANG) as web:
            answer = await web.post("/tokenize", json={"prompt": text})
            assert answer.status_code == 400
        assert [token async for chunk in stream for token in chunk.token_ids]
    assert memory(pid, "VmHWM") - before < GIB // 2
    faulty.good_request()
