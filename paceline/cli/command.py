"""Parsing, help and error messages common to all commands.

Errors of a configuration name a field. For users of the command line, they are rewritten to name the option
or variable: `max_model_len` becomes `--max-model-len`, or `PACELINE_MAX_MODEL_LEN` if the value came from the
environment.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, Iterator
from typing import Any

import typer
from typer.core import TyperArgument, TyperCommand, TyperGroup

from paceline.cli.environment import unknown_variables
from paceline.cli.groups import GROUPED_COMMANDS, OTHER, group_of, in_order
from paceline.cli.vllm import translated
from paceline.core.errors import InvalidArgumentError, UnavailableError
from paceline.supervisor import ChildFailedError
from paceline.telemetry.logs import configure_logging

_FIELD = re.compile(r"(?<![\w/.-])[a-z]+(?:_[a-z]+)+(?![\w/-]|\.\w)")
"""A field name in a message: a name with an underscore that is not part of a path."""
VALUES_SEPARATOR = ","
"""Between the values of a repeatable option in its environment variable."""
_OPTION = re.compile(r"(--[a-z][a-z-]*): (.*)", re.DOTALL)

log = logging.getLogger(__name__)


class Command(TyperCommand):
    """A command of Paceline."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        for parameter in self.params:
            # A path may have spaces, at which several values in one variable would be split by default.
            setattr(parameter, "envvar_list_splitter", VALUES_SEPARATOR)  # noqa: B010

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parse arguments; `serve` also accepts vLLM's option names. Raises typer's errors."""
        known = {name for parameter in self.params for name in (*parameter.opts, *parameter.secondary_opts)}
        return super().parse_args(ctx, translated(args, known) if self.name == "serve" else args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Raises InvalidArgumentError naming the option or the variable."""
        try:
            _warn_of_unknown_variables(ctx)
            return super().invoke(ctx)
        except InvalidArgumentError as error:
            field, description = told_as(ctx, error.field), _with_option_names(ctx, error.description)
            raise type(error)(field, description) from error
        except UnavailableError as error:
            raise UnavailableError(_with_option_names(ctx, error.message), error.last_index) from error
        except ChildFailedError as error:
            raise _child_error(ctx, error) from error

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Format options in groups for commands with many options."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            title = "Arguments" if isinstance(parameter, TyperArgument) else OTHER
            if self.name in GROUPED_COMMANDS and title == OTHER:
                title = group_of(parameter.name or "") or OTHER
            sections.setdefault(title, []).append(record)
        for title in in_order(sections):
            with formatter.section(title):
                formatter.write_dl(sections[title])


class Commands(typer.Typer):
    """A group of commands."""

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        """Register a command."""
        return super().command(name, **{"cls": Command, **settings})


def told_as(context: Any, field: str) -> str:
    """The option, variable or argument that sets a field of this command; else the field itself."""
    for parameter in context.command.params if context is not None else ():
        if parameter.name != field:
            continue
        source = context.get_parameter_source(field)
        if source is not None and source.name == "ENVIRONMENT" and isinstance(parameter.envvar, str):
            return str(parameter.envvar)
        if isinstance(parameter, TyperArgument):
            return field.upper()
        return str(max(parameter.opts, key=len))
    return field


def _with_option_names(context: Any, text: str) -> str:
    """Replace the field names in a message by options."""
    return _FIELD.sub(lambda match: told_as(context, match[0]), text)


def _child_error(context: Any, error: ChildFailedError) -> ChildFailedError:
    """A child's error in terms of this command's options: a draft worker's `--model` is `--draft-model`."""
    text = error.message.removeprefix(f"{error.role}: ")
    match = _OPTION.fullmatch(text)
    if match is None:
        return error
    fields = {name: parameter.name for parameter in context.command.params for name in parameter.opts}
    candidates = [f"--{error.role}-{match[1].removeprefix('--')}", match[1]]
    known = [option for option in candidates if option in fields]
    given = [
        option
        for option in known
        if (source := context.get_parameter_source(fields[option])) is not None
        and not source.name.startswith("DEFAULT")
    ]
    for option in (*given, *known):
        named = told_as(context, fields[option])
        return ChildFailedError(error.role, match[2], error.exit_code, option=named)
    return error


def _warn_of_unknown_variables(context: Any) -> None:
    """Warn about PACELINE_ variables without effect. In child processes, the parent does this."""
    if context.params.get("exit_with_parent"):
        return
    warnings = unknown_variables(_variables(context.find_root().command))
    if not warnings:
        return
    log_format = context.params.get("log_format")
    if log_format is not None:
        configure_logging(context.info_name, log_format)
    for warning in warnings:
        if log_format is None:
            print(f"warning: {warning}", file=sys.stderr)
        else:
            log.warning("%s", warning)


def _variables(command: Any) -> Iterator[str]:
    """Variables of all options of a command and its subcommands."""
    for parameter in command.params:
        if isinstance(parameter.envvar, str):
            yield parameter.envvar
    if isinstance(command, TyperGroup):
        for each in command.commands.values():
            yield from _variables(each)
