"""Workers behind a host name: failures of the resolver, address families, places that are refused."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from coordinator.workers.directory.dns import DnsDirectory
from coordinator.workers.directory.registry import open_directories
from paceline.core.errors import InvalidArgumentError

HANG = 30.0


class Answers:
    """A resolver that gives its answers in turn, the last one for ever; None fails."""

    def __init__(self, *answers: Sequence[str] | None) -> None:
        self.answers = list(answers)
        self.asked = 0

    async def __call__(self, host: str) -> Sequence[str]:
        self.asked += 1
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if answer is None:
            raise socket.gaierror(-3, "temporary failure in name resolution")
        return answer


async def told(answers: Answers, count: int) -> list[list[str]]:
    """The addresses of the first lists of a watch."""
    watch = DnsDirectory("draft", "drafts:9", answers, ask_seconds=0.0).watch()
    async with asyncio.timeout(HANG):
        return [[member.address for member in await anext(watch)] for _ in range(count)]


async def test_a_failing_resolver_keeps_the_last_members(caplog: pytest.LogCaptureFixture) -> None:
    answers = Answers(["10.0.0.1"], None, None, ["10.0.0.1"], None, ["10.0.0.2", "10.0.0.1"])
    with caplog.at_level(logging.WARNING):
        assert await told(answers, 2) == [["10.0.0.1:9"], ["10.0.0.1:9", "10.0.0.2:9"]]
    # One line for each time that it begins to fail.
    assert [record.getMessage()[:25] for record in caplog.records] == ["drafts cannot be resolved"] * 2


async def test_an_unknown_name_lists_nobody_until_it_is_known() -> None:
    assert await told(Answers(None, None, ["10.0.0.5"]), 2) == [[], ["10.0.0.5:9"]]


async def test_an_unchanged_answer_is_not_told_again() -> None:
    answers = Answers(["b", "a"], ["a", "b"], ["a", "b", "a"], ["c"])
    assert await told(answers, 2) == [["a:9", "b:9"], ["c:9"]]
    assert answers.asked == 4


@pytest.mark.parametrize(
    ("found", "addresses"),
    [
        ([(socket.AF_INET6, "::1"), (socket.AF_INET, "127.0.0.1")], ["127.0.0.1:9"]),
        ([(socket.AF_INET6, "fd00::2"), (socket.AF_INET6, "fd00::1")], ["[fd00::1]:9", "[fd00::2]:9"]),
    ],
)
async def test_a_worker_is_listed_once(
    monkeypatch: pytest.MonkeyPatch, found: Sequence[tuple[int, str]], addresses: list[str]
) -> None:
    async def getaddrinfo(*_args: Any, **_more: Any) -> list[Any]:
        return [(family, 0, 0, "", (address, 0)) for family, address in found]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    watch = DnsDirectory("draft", "drafts:9").watch()
    assert [member.address for member in await anext(watch)] == addresses


@pytest.mark.parametrize("place", ["dns:drafts", "dns:drafts:", "dns::9", "dns:drafts:70000"])
def test_a_place_without_host_or_port_is_refused(place: str) -> None:
    with pytest.raises(InvalidArgumentError) as refused:
        open_directories(["a:1"], [place])
    assert refused.value.field == "drafts"
