"""Workers reached through Unix sockets: the tokens of gRPC, and gRPC where there is no socket."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from harness.log import Log
from harness.pair import Pair
from harness.stacks import RunningStack, own_coordinator, own_worker, running_stack
from harness.waiting import HANG

from paceline.client import Client
from paceline.supervisor import ChildFailedError

THROUGH = "frames go through"
LENGTH: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}
SAMPLINGS: list[dict[str, Any]] = [
    {**LENGTH, "temperature": 0},
    {**LENGTH, "temperature": 1, "seed": 9},
    {**LENGTH, "temperature": 0.8, "seed": 4, "repetition_penalty": 1.2, "logprobs": 2},
]


def text(client: Client, sampling: dict[str, Any] = SAMPLINGS[0], k: int = 4) -> tuple[int, ...]:
    speculation = {"num_speculative_tokens": k}
    return tuple(client.generate("def f(", sampling, speculation=speculation, timeout=HANG).token_ids)


def texts(client: Client) -> list[tuple[int, ...]]:
    return [text(client, sampling, k) for sampling in SAMPLINGS for k in (0, 4)]


def sockets(running: RunningStack) -> list[Path]:
    infos = [worker.info for worker in running.client.status().workers]
    return [Path(info.local_socket) for info in infos if info is not None and info.local_socket]


def test_a_stacks_workers_are_reached_through_local_sockets(tiny_stack: RunningStack) -> None:
    assert len(tiny_stack.log.find(THROUGH)) >= 2
    paths = sockets(tiny_stack)
    assert len(set(paths)) == 2
    assert all(path.is_socket() for path in paths)


def test_local_sockets_give_the_tokens_of_grpc(tiny_stack: RunningStack, tiny_pair: Pair) -> None:
    with running_stack(tiny_pair, local_sockets=False) as other:
        assert not other.log.find(THROUGH)
        assert sockets(other) == []
        expected = texts(other.client)
    assert texts(tiny_stack.client) == expected


def test_a_coordinator_may_use_grpc_only(tiny_stack: RunningStack, tiny_pair: Pair) -> None:
    targets, drafts = ([tiny_stack.stack.address_of(role)] for role in ("target", "draft"))
    with own_coordinator(tiny_pair, targets, drafts, local_sockets=False) as own:
        assert texts(own.client) == texts(tiny_stack.client)
        assert not own.log.find(THROUGH)


def test_a_separate_worker_listens_at_its_given_socket(tiny_pair: Pair, folder: Path) -> None:
    path = folder / "target.sock"
    log = Log()
    with own_worker("target", tiny_pair.target, log, local_socket=str(path)) as address:
        with own_coordinator(tiny_pair, [address]) as own:
            first = text(own.client)
            assert own.log.find(f"{THROUGH} {path}")
            # No coordinator finds the file any more, as in another container: it asks through gRPC.
            path.unlink()
            with own_coordinator(tiny_pair, [address]) as other:
                assert text(other.client) == first
                assert not other.log.find(THROUGH)
        assert not log.find("Traceback")


def test_an_unusable_socket_path_is_named(tiny_pair: Pair, folder: Path) -> None:
    path = folder / "nowhere" / "target.sock"
    with pytest.raises(ChildFailedError, match=str(path)):  # noqa: SIM117
        with own_worker("target", tiny_pair.target, local_socket=str(path)):
            pytest.fail("it must not start")
