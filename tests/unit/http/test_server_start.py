"""A port that cannot be served is an error, not a hang."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from coordinator.api.http.server.server import HttpServer
from paceline.core.errors import InvalidArgumentError, UnavailableError
from tests.unit.rpc.test_certificate_keys import GOOD, files

HANG = 20.0


async def test_a_failed_server_start_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    server = HttpServer(None, "127.0.0.1", 0)  # type: ignore[arg-type]

    def fail() -> None:
        raise OSError("no more descriptors")

    monkeypatch.setattr(server._uvicorn.config, "load", fail)
    async with asyncio.timeout(HANG):
        with pytest.raises(UnavailableError, match=r"cannot serve HTTP on 127\.0\.0\.1:") as caught:
            await server.start()
        await server.stop(1)
    assert isinstance(caught.value.__cause__, OSError)


async def test_a_half_replaced_certificate_is_named(tmp_path: Path) -> None:
    """The new key is there, the new certificate is not."""
    (old := tmp_path / "old").mkdir()
    (new := tmp_path / "new").mkdir()
    tls, renewed = files(old, GOOD["P-256"]()), files(new, GOOD["P-256"]())
    server = HttpServer(None, "127.0.0.1", 0, tls)  # type: ignore[arg-type]
    shutil.copy(renewed.key, tls.key)
    async with asyncio.timeout(HANG):
        with pytest.raises(InvalidArgumentError) as caught:
            await server.start()
        await server.stop(1)
    assert caught.value.field == "tls_key"
