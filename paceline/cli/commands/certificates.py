"""`paceline certificates`: create an authority and a certificate for each role."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from paceline.core.errors import UnavailableError


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(certificates)


def certificates(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder for the files.", file_okay=False)],
    role: Annotated[
        list[str] | None,
        typer.Option("--role", help="coordinator, target, draft or client; repeatable; default all."),
    ] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            help="Name or address of the server, in addition to localhost, 127.0.0.1 and ::1; repeatable.",
        ),
    ] = None,
    name: Annotated[str, typer.Option("--name", help="Base name of the files; default the role.")] = "",
    days: Annotated[int, typer.Option("--days", help="Validity of a certificate in days.")] = 365,
) -> None:
    """Create a certificate authority and a certificate for each role.

    Existing files are never overwritten. To renew a certificate, remove its two files, then run the command
    with --role and the same --host and --name. ca.key is needed only to sign certificates: keep it off the
    serving machines.
    """
    try:
        from paceline.certificates import make_certificates
    except ModuleNotFoundError as error:
        raise UnavailableError(
            f"this command requires the module {error.name}: install paceline[certificates]"
        ) from None
    for file, of in make_certificates(folder, role or (), host or (), name, days).items():
        print(f"{file}  {of}")
