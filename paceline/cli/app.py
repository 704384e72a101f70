"""All commands, and how their errors are told: one line, exit code 2 for bad arguments, else 1.

A child that never got ready gives `serve` its own code; what Ctrl-C cuts short ends with 130.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import Annotated, NoReturn

import typer

from paceline.cli.command import Commands, told_as
from paceline.cli.commands import bench, certificates, chat, generate, keys, loadtest, plan, serve
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.supervisor import ChildFailedError

_HELP = "NoArgsIsHelpError"
"""What typer raises for a command that is nothing without another one; its message is the help. The class is
not among those that typer exports."""

app = Commands(
    name="paceline",
    help="Speculative decoding across processes: a draft guesses, a target verifies, no token changes.",
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for module in (serve, generate, chat, keys, certificates, plan, bench, loadtest):
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
        _fail(f"this command needs the module {error.name}: install paceline with its extra `all`", 1)
    except OSError as error:
        _fail(str(error), 1)
    sys.exit(code)


def _fail(message: str, code: int) -> NoReturn:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(code)


def _usage_message(error: typer.TyperException) -> str:
    """`--option: message`, as for errors of the configuration itself."""
    if not isinstance(error, typer.BadParameter):
        return error.format_message()
    name = told_as(error.ctx, error.param.name or "") if error.param is not None else None
    message = error.message.removeprefix("Value error, ") or "is required"
    return f"{name}: {message}" if name else error.format_message()
