"""Certificates as `paceline certificates` makes them, and what an error must not reveal."""

from __future__ import annotations

import ssl
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from paceline.certificates import make_certificates
from paceline.core.security.tls import Tls


def make(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command; `check` is the caller's."""
    command = [sys.executable, "-m", "paceline", "certificates", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@dataclass(frozen=True)
class Certificates:
    """A folder of certificates of one authority."""

    folder: Path

    @classmethod
    def made(cls, folder: Path) -> Certificates:
        """All roles."""
        make_certificates(folder)
        return cls(folder)

    @property
    def ca(self) -> str:
        """The authority's file."""
        return str(self.folder / "ca.pem")

    def tls(self, role: str, *, ca: str | None = None, server_name: str = "") -> Tls:
        """Settings of a process of this role; `ca` another authority's file, or empty."""
        return Tls(
            certificate=str(self.folder / f"{role}.pem"),
            key=str(self.folder / f"{role}.key"),
            ca=self.ca if ca is None else ca,
            server_name=server_name,
        )

    def context(self, role: str | None) -> ssl.SSLContext:
        """The same for HTTP clients; None shows no certificate."""
        context = ssl.create_default_context(cafile=self.ca)
        if role is not None:
            context.load_cert_chain(self.folder / f"{role}.pem", self.folder / f"{role}.key")
        return context


def says_nothing(text: str, *secrets: str) -> None:
    """Fail if an error's text tells of keys, files, code or exceptions."""
    for forbidden in (*secrets, "Traceback", ".py", ".pem", ".key", "/tmp", "Exception", "Error:", "sha256"):
        assert forbidden not in text, text
