"""`paceline keys`: the file of API keys that a coordinator is given with `--api-keys`."""

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

File = Annotated[Path, option("api_keys", "The file.", dir_okay=False)]
Name = Annotated[str, typer.Argument(help="Whose key it is.")]

KEY_BYTES = 32


def register(app: typer.Typer) -> None:
    """Add these commands."""
    keys = Commands(help="Make, list and remove API keys.", no_args_is_help=True, rich_markup_mode=None)
    keys.command()(add)
    keys.command("list")(list_keys)
    keys.command()(remove)
    app.add_typer(keys, name="keys")


def add(
    name: Name,
    api_keys: File,
    requests_per_minute: Annotated[
        int | None, _limit("requests_per_minute", "Calls a minute; no limit if not given.")
    ] = None,
    max_sequences: Annotated[
        int | None, _limit("max_sequences", "Sequences at a time; no limit if not given.")
    ] = None,
) -> None:
    """Make a key, print it, and keep its hash: it is shown this once. SIGHUP tells a running coordinator."""
    token = PREFIX + secrets.token_urlsafe(KEY_BYTES)
    made = ApiKey(
        name=name,
        sha256=digest(token),
        requests_per_minute=requests_per_minute,
        max_sequences=max_sequences,
    )
    with _changed_by_nobody_else(api_keys):
        keys = read_keys(api_keys).keys if api_keys.exists() else ()
        if any(key.name == name for key in keys):
            raise InvalidArgumentError("name", "has a key already; remove it first")
        write_keys(api_keys, KeyRing((*keys, made)))
        try:
            print(token, flush=True)
        except OSError:  # a key that nobody has seen must not stay
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
        print(f"{key.name}: {', '.join(limits) or 'no limits'}")


def remove(name: Name, api_keys: File) -> None:
    """Remove a key. SIGHUP tells a running coordinator; requests that it serves go on to their end."""
    with _changed_by_nobody_else(api_keys):
        keys = read_keys(api_keys).keys
        rest = [key for key in keys if key.name != name]
        if len(rest) == len(keys):
            raise InvalidArgumentError("name", "has no key")
        write_keys(api_keys, KeyRing(rest))


@contextlib.contextmanager
def _changed_by_nobody_else(file: Path) -> Iterator[None]:
    """Of two that read it before either has written, one would undo what the other did.

    What is locked is a file beside it, since the file itself is replaced. That one is removed again: left
    there by root, it would be closed to others who may write the folder. Raises InvalidArgumentError naming
    `api_keys`.
    """
    try:
        import fcntl
    except ImportError:  # this system has no such locks
        yield
        return
    beside = file.with_name(f".{file.name}.lock")
    with contextlib.ExitStack() as held:
        while True:
            try:
                lock = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            except OSError as error:
                raise InvalidArgumentError(
                    "api_keys", f"{file} cannot be written: {beside} cannot be made: {error.strerror}"
                ) from None
            held.callback(os.close, lock)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
            except OSError:  # nor has this file system
                held.callback(beside.unlink, missing_ok=True)
                break
            # Whoever held it before us has removed it, and others may hold a new one by now.
            with contextlib.suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock), beside.stat()):
                    break
        held.callback(beside.unlink, missing_ok=True)
        yield


def _limit(name: str, description: str) -> Any:
    """An option that no variable sets: that of `max_sequences` is a worker's bound, not one key's."""
    return typer.Option(flag(name), help=description)
