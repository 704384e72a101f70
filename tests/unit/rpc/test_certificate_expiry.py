"""Ends of certificates, and warnings before them."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from paceline.core.security.tls import Tls
from paceline.rpc.security import certificate_expiry
from paceline.rpc.security.certificate_expiry import CertificateExpiry, stage
from paceline.rpc.security.certificate_keys import ends

END = datetime(2031, 5, 7, 12, 30, 15, tzinfo=UTC)
DAY = timedelta(days=1)


def certificate(end: datetime) -> bytes:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "x")])
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(end - timedelta(days=400)).not_valid_after(end)
    return made.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.PEM)


@pytest.mark.parametrize("year", [1951, 2031, 2049, 2050, 2061])
def test_the_end_is_read_in_both_time_formats(year: int) -> None:
    """From 2050 on a certificate has four digits for the year."""
    end = END.replace(year=year)
    assert ends(certificate(end)) == [end]


def test_every_certificate_of_a_file_is_read() -> None:
    file = b"text\n" + certificate(END) + certificate(END + DAY)
    assert ends(file) == [END, END + DAY]


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"no certificate",
        b"-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----",
        b"-----BEGIN CERTIFICATE-----\nMAA=\n-----END CERTIFICATE-----",
    ],
)
def test_invalid_content_has_no_end(content: bytes) -> None:
    assert ends(content) == []


@pytest.mark.parametrize(
    ("days", "warnings"), [(31, 0), (30, 0), (29.9, 1), (7, 1), (6.9, 2), (0.9, 3), (0, 3), (-0.1, 4)]
)
def test_warnings_are_due_at_30_7_and_1_days(days: float, warnings: int) -> None:
    assert stage(days) == warnings


class Clock:
    """Says what it is told to."""

    def __init__(self, days_before: float) -> None:
        self.days = days_before

    def __call__(self) -> datetime:
        return END - timedelta(days=self.days)


@pytest.fixture
def clock() -> Clock:
    return Clock(40)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "c.pem").write_bytes(certificate(END))
    (tmp_path / "ca.pem").write_bytes(certificate(END + 1000 * DAY))
    return tmp_path


@pytest.fixture
def of(folder: Path, clock: Clock) -> CertificateExpiry:
    files = Tls(certificate=str(folder / "c.pem"), key=str(folder / "c.key"), ca=str(folder / "ca.pem"))
    return CertificateExpiry({"worker_tls": files, "other": None}, clock)


def test_each_warning_is_written_once(
    of: CertificateExpiry, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    told = []
    for days in (40, 29, 28, 6, 5, 0.5, 0.1, -1, -2):
        clock.days = days
        caplog.clear()
        of.check()
        told.append([record.levelname for record in caplog.records])
    assert told == [[], ["WARNING"], [], ["WARNING"], [], ["WARNING"], [], ["ERROR"], []]


@pytest.mark.parametrize(
    ("days", "level", "words"),
    [
        (-3, "ERROR", ("worker_tls_certificate has expired", "2031-05-07 12:30 UTC")),
        (0.5, "WARNING", ("worker_tls_certificate expires in 0.5 days:",)),
    ],
)
def test_starting_after_or_near_the_end_is_logged_once(
    days: float, level: str, words: Any, of: Any, clock: Clock, folder: Path, caplog: Any
) -> None:
    clock.days = days
    of.check()
    (record,) = caplog.records
    assert record.levelname == level
    for word in (*words, str(folder / "c.pem")):
        assert word in record.getMessage()


def test_a_renewed_certificate_is_warned_of_anew(
    folder: Path, of: CertificateExpiry, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    clock.days = 5
    of.check()
    (folder / "c.pem").write_bytes(certificate(END + 100 * DAY))
    of.check()
    assert len(caplog.records) == 1
    assert of.days_left()["worker_tls_certificate"] == pytest.approx(105)
    clock.days = -95
    of.check()
    assert len(caplog.records) == 2


def test_days_left_are_given_by_setting(of: CertificateExpiry, clock: Clock, folder: Path) -> None:
    clock.days = 2.5
    assert of.days_left() == {}
    of.check()
    told = {"worker_tls_certificate": 2.5, "worker_tls_ca": 1002.5}
    assert of.days_left() == told
    (folder / "c.pem").unlink()
    of.check()
    assert of.days_left() == told, "a removed file keeps its end"


def test_chains_end_with_the_first_and_authorities_with_the_last(
    folder: Path, of: CertificateExpiry, clock: Clock
) -> None:
    clock.days = 0
    both = certificate(END + DAY) + certificate(END + 9 * DAY)
    for name in ("c.pem", "ca.pem"):
        (folder / name).write_bytes(both)
    of.check()
    assert of.days_left() == {"worker_tls_certificate": 1.0, "worker_tls_ca": 9.0}


async def test_files_are_watched_while_the_process_serves(
    folder: Path, of: CertificateExpiry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(certificate_expiry, "CHECK_SECONDS", 0.001)
    seen, check = asyncio.Event(), of.check

    def checked() -> None:
        check()
        if of.days_left()["worker_tls_certificate"] > 50:
            seen.set()

    monkeypatch.setattr(of, "check", checked)
    watching = asyncio.create_task(of.watch())
    (folder / "c.pem").write_bytes(certificate(END + 100 * DAY))
    async with asyncio.timeout(60):
        await seen.wait()
    watching.cancel()


async def test_without_certificates_nothing_is_watched() -> None:
    async with asyncio.timeout(60):
        await CertificateExpiry({"tls": None}).watch()
