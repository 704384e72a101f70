"""`paceline keys`: manages the file of API keys for a coordinator's `--api-keys`."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from paceline.cli.command import Commands
from paceline.cli.options import option
from paceline.core.errors import InvalidArgumentError
from paceline.core.security.keyfile import read_keys, write_keys
from paceline.core.security.keys import PREFIX, ApiKey, KeyRing, digest
from paceline.supervisor.arguments import flag

File = Annotated[Path, option("api_keys", "File of API keys.", dir_okay=False)]
Name = Annotated[str, typer.Argument(help="Name of the key's holder.")]

KEY_BYTES = 32


def register(app: typer.Typer) -> None:
    """Add these commands."""
    keys = Commands(help="Create, list and remove API keys.", no_args_is_help=True, rich_markup_mode=None)
    keys.command()(add)
    keys.command("list")(list_keys)
    keys.command()(remove)
    app.add_typer(keys, name="keys")


def add(
    name: Name,
    api_keys: File,
    requests_per_minute: Annotated[
        int | None, _limit("requests_per_minute", "Calls per minute; default no limit.")
    ] = None,
    max_sequences: Annotated[
        int | None, _limit("max_sequences", "Concurrent sequences; default no limit.")
    ] = None,
    admin: Annotated[bool, typer.Option(flag("admin"), help="The key may profile workers.")] = False,
) -> None:
    """Create a key, print it and store its hash. The key is shown only once. SIGHUP makes a running
    coordinator reload the file."""
    token = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    made = ApiKey(
        name=name,
        sha256=digest(token),
        requests_per_minute=requests_per_minute,
        max_sequences=max_sequences,
        admin=admin,
    )
    with _exclusive_access(api_keys):
        keys = read_keys(api_keys).keys if api_keys.exists() else ()
        if any(key.name == name for key in keys):
            raise InvalidArgumentError("name", "already has a key; remove it first")
        write_keys(api_keys, KeyRing((*keys, made)))
        try:
            print(token, flush=True)
        except OSError:  # a key that was not shown must not stay
            write_keys(api_keys, KeyRing(keys))
            raise


def list_keys(api_keys: File) -> None:
    """Print each key's name and limits."""
    for key in read_keys(api_keys).keys:
        limits = [
            f"{value} {what}"
            for value, what in (
                (key.requests_per_minute, "requests per minute"),
                (key.max_sequences, "sequences at a time"),
            )
            if value is not None
        ]
        print(f"{key.name}{' (admin)' * key.admin}: {', '.join(limits) or 'no limits'}")


def remove(name: Name, api_keys: File) -> None:
    """Remove a key. SIGHUP makes a running coordinator reload the file; running requests are not ended."""
    with _exclusive_access(api_keys):
        keys = read_keys(api_keys).keys
        rest = [key for key in keys if key.name != name]
        if len(rest) == len(keys):
            raise InvalidArgumentError("name", "has no key")
        write_keys(api_keys, KeyRing(rest))


@contextlib.contextmanager
def _exclusive_access(file: Path) -> Iterator[None]:
    """Exclusive access, so that concurrent changes do not overwrite each other.

    Locks a separate file, because the key file itself is replaced. The lock file is removed afterwards: one
    left by root would block other users of the folder. Raises InvalidArgumentError naming `api_keys`.
    """
    try:
        import fcntl
    except ImportError:  # no file locks on this system
        yield
        return
    beside = file.with_name(f".{file.name}.lock")
    with contextlib.ExitStack() as held:
        while True:
            try:
                lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise InvalidArgumentError(
                    "api_keys", f"{file} cannot be written: {beside} cannot be created: {error.strerror}"
                ) from None
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # no locks on this file system
                held.callback(beside.unlink, missing_ok=True)
                break
            # The previous holder has removed the file, so another process may have locked a new one.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), beside.stat()):
                    break
        held.callback(beside.unlink, missing_ok=True)
        yield


def _limit(name: str, description: str) -> Any:
    """An option without a variable, because PACELINE_MAX_SEQUENCES is a worker's bound, not a key's."""
    return typer.Option(flag(name), help=description)
