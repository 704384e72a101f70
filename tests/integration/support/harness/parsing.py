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
from pip._internal.commands import create_command

from harness import compose
from harness.pages import ROOT
from paceline.cli.app import app
from paceline.cli.vllm import NOT_HERE, SAME_MEANING, SO_ANYWAY

_COMPOSE_COMMANDS = frozenset({"up", "build", "run", "exec", "ps", "logs", "down", "config", "restart"})
_COMPOSE_FLAGS = frozenset({"--build", "--rm", "--no-deps"})


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


_RAY_SERVE_COMMANDS = frozenset({"run", "build", "deploy", "status", "config", "shutdown"})


def ray_serve(words: Sequence[str]) -> None:
    """The subcommand is Ray's; manifests exist, and import paths are of our package."""
    from paceline import ray

    subcommand, *rest = words
    assert subcommand in _RAY_SERVE_COMMANDS, subcommand
    named = rest[: rest.index("-o")] if "-o" in rest else rest
    for word in named:
        if word.endswith(".yaml"):
            assert (ROOT / word).is_file(), word
        elif not word.startswith("-"):
            module, _, name = word.partition(":")
            assert (module, name in ray.__all__) == ("paceline.ray", True), word


def docker_compose(words: Sequence[str]) -> None:
    """Files, profiles and services exist, scaled ones are started; a command inside a service is taken."""
    given, rest = _options(words, {"-f": [], "--profile": []})
    project = compose.read(*given["-f"])
    profiles = {each for service in project.services.values() for each in service.get("profiles", ())}
    assert set(given["--profile"]) <= profiles, f"{given['--profile']}: profiles are {sorted(profiles)}"
    subcommand, *rest = rest
    assert subcommand in _COMPOSE_COMMANDS, subcommand
    own, rest = _options(rest, {"--scale": [], "--entrypoint": []})
    named = rest[:1] if subcommand in ("run", "exec") else rest
    assert set(named) <= project.services.keys(), f"{named} of {sorted(project.services)}"
    started = project.started(*named, profiles=given["--profile"])
    for each in own["--scale"]:
        service, _, count = each.partition("=")
        assert int(count) > 0
        assert service in started, f"{service} is scaled, but not started"
        assert "ports" not in project.services[service]
    if subcommand in ("run", "exec"):
        assert named, f"no service of {sorted(project.services)} in {words}"
        within = rest[1:]
        if own["--entrypoint"]:
            return
        if subcommand == "run":
            within = [*project.services[named[0]].get("entrypoint", ["paceline"]), *within]
        if within[:1] == ["paceline"]:
            paceline(within[1:])


def _options(words: Sequence[str], valued: dict[str, list[str]]) -> tuple[dict[str, list[str]], list[str]]:
    """The values of leading options, and the words after them; options without a value are skipped."""
    rest = list(words)
    skipped: list[str] = []
    while rest and (rest[0].startswith("-")):
        option = rest.pop(0)
        if option in valued:
            valued[option].append(rest.pop(0))
        else:
            skipped.append(option)
    assert set(skipped) <= _COMPOSE_FLAGS, skipped
    return valued, rest


def docker_run(words: Sequence[str]) -> None:
    """What is mounted from here exists."""
    mounted = [re.match(r"\$PWD/([^:]*):", word) for word in words]
    assert all((ROOT / file[1]).exists() for file in mounted if file)


def python_module(words: Sequence[str]) -> None:
    """The module is there."""
    assert importlib.util.find_spec(words[0]) is not None, words[0]
