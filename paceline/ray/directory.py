"""The replicas of a Serve deployment, as a directory of workers and as a coordinator's view of itself.

Serve tells a deployment's router of its replicas (`paceline.ray.router`), which passes them on here. A handle
to the deployment starts its router.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from coordinator.workers.directory.interface import Member
from paceline.core.errors import InvalidArgumentError

SCHEME = "ray"
"""Of an address such as `ray:APPLICATION/DEPLOYMENT`."""

Deployment = tuple[str, str]
"""Names of the application and of the deployment."""


@dataclass(frozen=True, slots=True)
class Replica:
    """A replica that Serve lists as running."""

    name: str
    """Unique in the cluster, for ever."""
    address: str
    """host:port of its process's own port."""


Told = Callable[[Sequence[Replica]], None]

_lock = threading.Lock()
_known: dict[Deployment, Sequence[Replica]] = {}
_followers: dict[Deployment, list[Told]] = {}


def publish(deployment: Deployment, replicas: Sequence[Replica]) -> None:
    """Tell all followers in this process of a deployment's replicas. Called by its router, in any thread."""
    with _lock:
        _known[deployment] = replicas
        followers = [*_followers.get(deployment, ())]
    for told in followers:
        told(replicas)


@contextlib.contextmanager
def following(deployment: Deployment, told: Told) -> Iterator[Sequence[Replica]]:
    """The replicas known so far. While the block lasts, `told` gets each new list, in other threads."""
    with _lock:
        _followers.setdefault(deployment, []).append(told)
        known = _known.get(deployment, ())
    try:
        yield known
    finally:
        with _lock:
            _followers[deployment].remove(told)


def start_router(deployment: Deployment) -> Any:
    """A handle to the deployment, whose router follows its replicas while the handle lives."""
    from ray import serve

    application, name = deployment
    handle = serve.get_deployment_handle(name, application)
    return handle.options(method_name="ready")


class ServeDirectory:
    """The workers that are replicas of one deployment."""

    def __init__(self, role: str, place: str, start: Callable[[Deployment], object] = start_router) -> None:
        """`place` is APPLICATION/DEPLOYMENT. Raises InvalidArgumentError naming the list of addresses."""
        application, slash, name = place.rpartition("/")
        if not (application and slash and name):
            message = f"must be {SCHEME}:APPLICATION/DEPLOYMENT, got {SCHEME}:{place}"
            raise InvalidArgumentError(f"{role}s", message)
        self._role = role
        self._deployment = application, name
        self._start = start
        self._router: object = None
        """Follows the replicas as long as it lives."""

    async def watch(self) -> AsyncIterator[Sequence[Member]]:
        """Yield the members, none before Serve has listed any, and again whenever they change."""
        loop, changed, listed = asyncio.get_running_loop(), asyncio.Event(), self._members(())

        def replaced(replicas: Sequence[Replica]) -> None:
            nonlocal listed
            listed = self._members(replicas)
            changed.set()

        def told(replicas: Sequence[Replica]) -> None:
            loop.call_soon_threadsafe(replaced, replicas)

        with following(self._deployment, told) as known:
            listed = self._members(known)
            self._router = self._start(self._deployment)
            yield listed
            while True:
                await changed.wait()
                changed.clear()
                yield listed

    def _members(self, replicas: Sequence[Replica]) -> Sequence[Member]:
        """One for each address: that of a replica that has ended may be another's by now."""
        return [Member(self._role, address) for address in dict.fromkeys(each.address for each in replicas)]

    def report(self, member: Member, refusal: str) -> None:
        """The log has the refusal already; Serve checks a replica's health by itself."""


async def left_out(deployment: Deployment, replica: str, seconds: float) -> None:
    """Wait until a replica that was listed has been missing for this long: Serve is stopping it.

    Serve stops sending requests to such a replica, but tells it only when the present ones have ended. It
    also leaves a replica out for a moment while it gets a new configuration.
    """
    loop, listed, missing = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()

    def noted(replicas: Sequence[Replica]) -> None:
        if any(each.name == replica for each in replicas):
            missing.clear()
            listed.set()
        elif listed.is_set():
            listed.clear()
            missing.set()

    def told(replicas: Sequence[Replica]) -> None:
        loop.call_soon_threadsafe(noted, replicas)

    with following(deployment, told) as known:
        noted(known)
        while True:
            await missing.wait()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds):
                    await listed.wait()
            if missing.is_set():
                return
