"""A resolver that reads `ADDRESS NAME` lines of the file in PACELINE_TEST_HOSTS, as /etc/hosts has them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from coordinator.workers.directory.dns import DnsDirectory
from coordinator.workers.directory.registry import DIRECTORIES


def addresses(host: str) -> list[str]:
    lines = Path(os.environ["PACELINE_TEST_HOSTS"]).read_text().splitlines()
    return [address for address, name in (line.split() for line in lines) if name == host]


async def resolve(host: str) -> Sequence[str]:
    return addresses(host)


def register() -> None:
    DIRECTORIES["dns"] = partial(DnsDirectory, resolve=resolve)
