"""Options and dataclasses correspond in both directions."""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.testing import CliRunner

from paceline.cli.options import Defaults, field_docs, option, options_from_fields
from paceline.cli.structuring import Structure
from paceline.core.config import CoordinatorConfig, DraftConfig, TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, StructuredOutputs
from paceline.loadtest import LoadConfig
from paceline.supervisor import StackConfig, arguments, flag
from paceline.supervisor.arguments import negative_flag

Config = DraftConfig | TargetConfig | CoordinatorConfig
CLASSES = (DraftConfig, TargetConfig, CoordinatorConfig)
SETTINGS = Path(__file__).parents[3] / "docs" / "operations.md"
_WORKER: dict[str, Any] = {
    "model": "a model",
    "host": "::1",
    "join": ("a:1", "dns:b:2"),
    "advertise": "c:3",
    "device": "cuda:1",
    "dtype": "bfloat16",
    "attention_backend": "varlen",
    "log_format": "json",
    "otlp_traces_endpoint": "http://c:4317",
}
_COORDINATOR = CoordinatorConfig(
    targets=("a:1", "b:2"),
    drafts=("c:3",),
    tokenizer="a folder/with a space",
    host="0.0.0.0",
    acceptance=AcceptanceMode.REJECTION,
    num_speculative_tokens=0,
    max_waiting=0,
    chat_template="a/template.jinja",
    generation_config="none",
    log_format="json",
    otlp_traces_endpoint="https://c:4317",
)


def changed(config: Any, leave: Collection[str] = ()) -> Any:
    """The same with another value in every field that still has its default, but for `leave`."""

    def other(value: Any) -> Any:
        match value:
            case bool():
                return not value
            case tuple():
                return ("a:1", "dns:b:2")
            case int() | None:
                return (value or 1) + 1
            case float():
                return value / 2
            case "auto":
                return 3
            case str():
                return value + "x"
        raise TypeError(f"an example for {value!r} is missing")

    same = {f.name: getattr(config, f.name) for f in fields(config)}
    default = [f for f in fields(config) if same[f.name] == f.default and f.name not in leave]
    return replace(config, **{f.name: other(f.default) for f in default})


APART: dict[str, Any] = {"local_socket": "a path/with a space", "gpu_memory_utilization": 0.5}
"""What has certificates has no local socket, and what counts blocks takes no share of a GPU."""
DRAFT = changed(DraftConfig(**_WORKER, support_mass=0.9, support_bound=32), leave=APART)
TARGET = changed(TargetConfig(**_WORKER), leave=APART)
LOCAL_DRAFT = DraftConfig(model="m", **APART)
LOCAL_TARGET = TargetConfig(model="m", **APART)
COORDINATOR = changed(_COORDINATOR, leave="num_speculative_tokens_per_batch_size")
TABLE_COORDINATOR = CoordinatorConfig(
    targets=("a:1",), tokenizer="t", num_speculative_tokens_per_batch_size="[[1, 4, 5], [5, 16, 0]]"
)
"""A table needs K to be chosen."""
SWITCHES = {flag(f.name) for cls in CLASSES for f in fields(cls) if f.default is False}
OFF = {negative_flag(f.name): flag(f.name) for cls in CLASSES for f in fields(cls) if f.default is True}
"""What switches a field off, to what switches it on."""


def parse(cls: type[Any], words: list[str], environment: Mapping[str, str] | None = None) -> Any:
    """What a command with one parameter of this class is called with."""
    seen: list[Any] = []

    def command(config: Any) -> None:
        seen.append(config)

    command.__annotations__["config"] = cls
    app = typer.Typer()
    app.command()(options_from_fields(command))
    result = CliRunner().invoke(app, words, env=environment, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return seen[0]


@pytest.mark.parametrize(
    "config",
    [
        DRAFT,
        TARGET,
        LOCAL_DRAFT,
        LOCAL_TARGET,
        DraftConfig(model="m"),
        TargetConfig(model="m"),
        COORDINATOR,
        TABLE_COORDINATOR,
        CoordinatorConfig(targets=("a:1",), tokenizer="t"),
    ],
)
def test_a_configuration_survives_its_command_line(config: Config) -> None:
    assert parse(type(config), arguments(config)) == config


@pytest.mark.parametrize(
    "configs", [(DRAFT, LOCAL_DRAFT), (TARGET, LOCAL_TARGET), (COORDINATOR, TABLE_COORDINATOR)]
)
def test_the_examples_set_every_field(configs: tuple[Config, ...]) -> None:
    words = [word for config in configs for word in arguments(config) if word.startswith("--")]
    assert {OFF.get(word, word) for word in words} == {flag(f.name) for f in fields(configs[0])}


def test_defaults_are_left_out_of_the_command_line() -> None:
    assert arguments(TargetConfig(model="m")) == ["--model", "m"]


@pytest.mark.parametrize("config", [DRAFT, TARGET, COORDINATOR])
def test_every_option_has_an_environment_variable(config: Config) -> None:
    environment = {}
    words = iter(arguments(config))
    for word in words:
        name = "PACELINE_" + OFF.get(word, word).removeprefix("--").replace("-", "_").upper()
        value = "0" if word in OFF else "1" if word in SWITCHES else next(words).replace(" ", "_")
        environment[name] = f"{environment[name]} {value}" if name in environment else value
    read = parse(type(config), [], environment)
    assert arguments(read) == [word.replace(" ", "_") for word in arguments(config)]


def test_options_take_precedence_over_the_environment() -> None:
    assert parse(TargetConfig, ["--model", "a"], {"PACELINE_MODEL": "b"}).model == "a"


def options_of(cls: type[Any]) -> list[Any]:
    """Those of a command with one parameter of this class."""

    def command(config: Any) -> None: ...

    command.__annotations__["config"] = cls
    app = typer.Typer()
    app.command()(options_from_fields(command))
    return [parameter for parameter in typer.main.get_command(app).params if parameter.name != "help"]


@pytest.mark.parametrize("cls", [*CLASSES, StackConfig, SamplingParams, Structure, LoadConfig])
def test_every_option_has_user_help(cls: type[Any]) -> None:
    """It mentions no Python values, and says of every repeatable option that it may be repeated."""
    for parameter in options_of(cls):
        described = getattr(parameter, "help", None)
        assert described, parameter.name
        assert not re.search("None|stands for itself", described), parameter.name
        assert not parameter.multiple or "may be repeated" in described.lower(), parameter.name


def test_the_settings_page_lists_every_option() -> None:
    text = SETTINGS.read_text(encoding="utf-8")
    workers, coordinator = text[text.index("\nWorkers (") :].split("\nCoordinator:\n")
    for cls, table in ((DraftConfig, workers), (TargetConfig, workers), (CoordinatorConfig, coordinator)):
        rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `--")]
        listed = {word for row in rows for word in re.findall("`(--[a-z-]+)`", row)}
        assert {OFF.get(word, word) for word in listed} >= {flag(f.name) for f in fields(cls)}


def test_the_settings_page_lists_what_serve_sets_itself() -> None:
    """Settings that `serve` renames begin with a worker's role there."""
    text = SETTINGS.read_text(encoding="utf-8")
    told = text[text.index("`paceline serve` has the settings of all three") :].partition("; its own are")[0]
    names = {flag(f.name) for cls in CLASSES for f in fields(cls)}
    served = {word for parameter in options_of(StackConfig) for word in parameter.opts}
    served |= {word.replace(role, "--", 1) for word in served for role in ("--target-", "--draft-")}
    assert set(re.findall("`(--[a-z-]+)`", told)) == names - served


def test_a_structure_option_sets_the_structure(tmp_path: Path) -> None:
    schema = tmp_path / "schema"
    schema.write_text('{"type": "object"}')
    examples: list[tuple[list[str], dict[str, Any]]] = [
        (["--json-schema", str(schema)], {"json": '{"type": "object"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a+"], {"regex": "a+"}),
        (["--choice", "a", "--choice", "b"], {"choice": ("a", "b")}),
    ]
    for words, values in examples:
        wanted = parse(Structure, words).of(SamplingParams()).structured_outputs
        assert wanted == StructuredOutputs(**values)
    assert parse(Structure, []).of(SamplingParams()).structured_outputs is None
    with pytest.raises(InvalidArgumentError, match="exactly one of"):
        parse(Structure, ["--json-object", "--regex", "a"]).of(SamplingParams())


class Colour(enum.Enum):
    RED = "red"


@dataclass(frozen=True)
class Example:
    number: int
    """How many."""
    colour: Colour | str | None = None
    bright: bool = True
    names: tuple[str, ...] = ("a", "b")
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class MoreOfIt(Example):
    colour: Colour | str | None = Colour.RED
    """Which."""


def test_field_docstrings_are_read() -> None:
    assert field_docs(Example) == {"number": "How many."}
    assert field_docs(MoreOfIt) == {"number": "How many.", "colour": "Which."}, "those of its base as well"


def test_fields_of_every_kind_are_parsed() -> None:
    assert parse(Example, ["--number", "3"]) == Example(3)
    assert parse(Example, ["--number", "3", "--no-bright"]) == Example(3, bright=False)
    assert parse(Example, ["--number", "3", "--colour", "red", "--names", "x"]) == Example(
        3, Colour.RED, names=("x",)
    )


def test_a_command_may_add_defaults_and_options() -> None:
    seen: list[Any] = []

    def command(
        example: Annotated[Example, Defaults({"number": 7})],
        extra: Annotated[str, option("extra", "More.")] = "x",
    ) -> None:
        seen.append((example, extra))

    command.__annotations__ = {
        "example": Annotated[Example, Defaults({"number": 7})],
        "extra": Annotated[str, option("extra", "More.")],
    }
    app = typer.Typer()
    app.command()(options_from_fields(command))
    assert CliRunner().invoke(app, [], catch_exceptions=False).exit_code == 0
    assert CliRunner().invoke(app, ["--number", "8", "--extra", "y"]).exit_code == 0
    assert seen == [(Example(7), "x"), (Example(8), "y")]
