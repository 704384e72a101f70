"""Commands that are parsed but not run: each function raises AssertionError for one that cannot work."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterator, Sequence
from typing import Any

import typer
import yaml
from pip._internal.commands import create_command

from harness.pages import ROOT
from paceline.cli.app import app
from paceline.cli.vllm import NOT_HERE, SAME_MEANING, SO_ANYWAY

_COMPOSE_COMMANDS = frozenset({"up", "build", "run", "exec", "ps", "logs", "down", "config", "restart"})


@functools.cache
def command_line() -> Any:
    """The whole of `paceline`."""
    return typer.main.get_command(app)


def paceline(words: Sequence[str], *, elided: bool = False) -> None:
    """Options, their values and arguments, as the command itself takes them before it begins.

    `elided`: what is required may be missing.
    """
    command, words, context = command_line(), list(words), None
    while True:
        name = command.name if context else "paceline"
        is_group = hasattr(command, "commands")
        try:
            context = command.make_context(name, list(words), parent=context)
        except typer.TyperException as error:
            if elided and "missing" in type(error).__name__.lower():
                return
            raise AssertionError(f"paceline {shlex.join(words)}: {error.format_message()}") from error
        except typer.Exit:  # of --help and --version
            return
        if not is_group:
            return
        _, command, words = command.resolve_command(context, [*context._protected_args, *context.args])


def paceline_options(words: Sequence[str]) -> None:
    """Commands and options by their names alone: in a sentence, values may be left out."""
    command = command_line()
    for word in words:
        option = word.partition("=")[0]
        if option in command_of(command) and not option.startswith("-"):
            command = command_of(command)[option]
        elif option.startswith("--") and option != "--help":
            assert option in set(options(command)), f"`paceline {shlex.join(words)}`: no {option}"
        elif command_of(command):
            assert option.isupper() or option == "--help", f"`paceline {shlex.join(words)}`: no {option}"
            return


def command_of(command: Any) -> dict[str, Any]:
    """The commands of a group; none of another command."""
    return getattr(command, "commands", {})


def options(command: Any) -> Iterator[str]:
    """Of a command and of all in it; vLLM's too where they are taken."""
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if command.name in ("serve", "paceline"):
        yield from (*SAME_MEANING, *SO_ANYWAY, *NOT_HERE)
    for each in command_of(command).values():
        yield from options(each)


def make(words: Sequence[str]) -> None:
    """The targets exist, and every `paceline` of their recipes is taken."""
    done = subprocess.run(["make", "-n", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        recipe = re.match(r"\S*bin/paceline\s+(.*)", line)
        if recipe:
            paceline(shlex.split(recipe[1]))


def pip_install(words: Sequence[str]) -> None:
    """Options are pip's, files are there, and extras are ours."""
    try:
        chosen, requirements = create_command("install").parse_args(list(words))
    except SystemExit as error:
        raise AssertionError(f"pip install {shlex.join(words)}") from error
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert requirements, "pip install installs nothing"
    assert all((ROOT / file).is_file() for file in chosen.constraints)
    for requirement in requirements:
        named = re.fullmatch(r"(?:\.|paceline)\[(.*)\]", requirement)
        assert named is None or set(named[1].split(",")) <= extras.keys(), requirement


def docker_compose(words: Sequence[str]) -> None:
    """The files and services exist; a command inside a service is taken."""
    rest, files = list(words), []
    while rest[0] == "-f":
        files.append(rest[1])
        rest = rest[2:]
    subcommand, *rest = rest
    assert subcommand in _COMPOSE_COMMANDS, subcommand
    services: set[str] = set()
    for file in files or ["docker-compose.yml"]:
        services |= yaml.safe_load((ROOT / file).read_text()).get("services", {}).keys()
    named = [word for word in rest if word in services]
    others = [word for word in rest if not word.startswith("-") and word not in services]
    if subcommand in ("run", "exec"):
        assert named, f"no service of {sorted(services)} in {words}"
        within = rest[rest.index(named[0]) + 1 :]
        if within[:1] == ["paceline"]:
            paceline(within[1:])
    else:
        assert others == [], f"{others} are no services of {sorted(services)}"


def docker_run(words: Sequence[str]) -> None:
    """What is mounted from here exists."""
    mounted = [re.match(r"\$PWD/([^:]*):", word) for word in words]
    assert all((ROOT / file[1]).exists() for file in mounted if file)


def python_module(words: Sequence[str]) -> None:
    """The module is there."""
    assert importlib.util.find_spec(words[0]) is not None, words[0]
