"""Threads that ask for short slices of a core."""

from __future__ import annotations

import ctypes
import platform
import threading
from collections.abc import Callable

import pytest

from paceline.core import slices


def _on_a_thread(work: Callable[[], None]) -> None:
    """What a thread asks for is its own: pytest's keeps what it has."""
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def _are_given() -> bool:
    """Linux from 6.12 on, on the processors whose system calls are known."""
    if platform.system() != "Linux" or platform.machine() not in ("x86_64", "aarch64"):
        return False
    major, minor = (int(part) for part in platform.release().split(".")[:2])
    return (major, minor) >= (6, 12)


def test_a_thread_and_what_it_starts_have_short_slices_until_they_give_them_back() -> None:
    found: dict[str, int] = {}
    given: list[bool] = []

    def note(when: str) -> None:
        found[when] = slices.current()

    def computes() -> None:
        note("started")
        slices.restore()
        note("computes")

    def begin() -> None:
        note("before")
        given.append(slices.shorten())
        note("short")
        _on_a_thread(computes)
        note("still")
        slices.restore()
        note("after")

    _on_a_thread(begin)
    assert given == [_are_given()]
    usual = found["before"]
    short = slices.SHORT_NS if _are_given() else usual
    assert found == {
        "before": usual,
        "short": short,
        "started": short,
        "computes": usual,
        "still": short,
        "after": usual,
    }


@pytest.mark.parametrize(("system", "machine"), [("Darwin", "arm64"), ("Linux", "riscv64")])
def test_elsewhere_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, system: str, machine: str) -> None:
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: machine)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: pytest.fail("a system call"))
    assert slices.shorten() is False
    slices.restore()
    assert slices.current() == 0


class Refusing:
    """A C library in a sandbox that forbids the calls."""

    def syscall(self, *_arguments: object) -> int:
        return -1


def test_a_refusal_costs_speed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: Refusing())
    assert slices.shorten() is False
    slices.restore()
    assert slices.current() == 0
