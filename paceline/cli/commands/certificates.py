"""`paceline certificates`: an authority and a certificate for each role, in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UnavailableError


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(certificates)


def certificates(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Where the files are written.", file_okay=False)
    ],
    role: Annotated[
        list[str] | None,
        typer.Option("--role", help="coordinator, target, draft or client; may be repeated; else all."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="A name or address of the server, beside localhost, 127.0.0.1 and ::1; may be repeated.",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Base name of the files; the role if not given.")] = "",
    days: Annotated[int, typer.Option("--days", help="How long a certificate is valid.")] = 365,
) -> None:
    """Make a certificate authority and a certificate for each role.

    Nothing is overwritten. To renew a certificate, remove its two files first, then give --role and the same
    --host, and --name if it had one. ca.key signs new certificates and is needed for nothing else: keep it
    off the machines that serve.
    """
    try:
        from paceline.certificates import make_certificates
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"this command needs the module {error.name}: install paceline with its extra `certificates`"
        ) from None
    for file, of in make_certificates(folder, role or (), host or (), name, days).items():
        print(f"{file}  {of}")
