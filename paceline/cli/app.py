"""The application: all commands, and error reporting.

An error is one line. The exit code is 2 for invalid arguments, 130 after Ctrl-C, the child's own code if a
child of `serve` fails to start, else 1.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from paceline.cli.command import Commands, told_as
from paceline.cli.commands import (
    bench,
    certificates,
    chat,
    drain,
    generate,
    keys,
    loadtest,
    measure,
    plan,
    profile,
    serve,
)
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.supervisor import ChildFailedError

_HELP = "NoArgsIsHelpError"
"""Class name of typer's exception for a missing subcommand, whose message is the help. typer does not export
the class."""

app = Commands(
    name="paceline",
    help="Speculative decoding across processes: a draft model proposes tokens, a target verifies them.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (serve, generate, chat, keys, certificates, plan, measure, bench, loadtest, profile, drain):
    module.register(app)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"paceline {version('paceline')}")
        raise typer.Exit


@app.callback()
def _root(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit the process."""
    command = typer.main.get_command(app)
    try:
        code = command.main(args=arguments, prog_name="paceline", standalone_mode=False)
    except typer.TyperException as error:
        if type(error).__name__ == _HELP:
            print(error.format_message(), file=sys.stderr)
            sys.exit(error.exit_code)
        _fail(_usage_message(error), error.exit_code)
    except ChildFailedError as error:
        _fail(error.message, error.exit_code)
    except InvalidArgumentError as error:
        _fail(error.message, 2)
    except PacelineError as error:
        _fail(error.message, 1)
    except ModuleNotFoundError as error:
        _fail(f"this command requires the module {error.name}: install paceline[all]", 1)
    except OSError as error:
        _fail(str(error), 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _usage_message(error: typer.TyperException) -> str:
    """`--option: message`, as for errors of a configuration."""
    if not isinstance(error, typer.BadParameter):
        return error.format_message()
    name = told_as(error.ctx, error.param.name or "") if error.param is not None else None
    message = error.message.removeprefix("Value error, ") or "is required"
    return f"{name}: {message}" if name else error.format_message()
