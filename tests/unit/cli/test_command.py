"""Errors name options or variables, unknown variables are warned of, and `--help` has groups."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import typer
from harness import compose
from harness.commands import command
from typer.testing import CliRunner

from coordinator import main
from paceline.cli import app as cli
from paceline.cli.commands import serve
from paceline.cli.environment import unknown_variables
from paceline.cli.groups import GROUPED_COMMANDS, GROUPS, group_of
from paceline.core.config import CoordinatorConfig
from paceline.supervisor import ChildFailedError, StackConfig, StackOptions

ROOT = Path(__file__).parents[3]
COMMANDS: Any = typer.main.get_command(cli.app).commands  # type: ignore[attr-defined]
LINK = "tcp://10.96.1.2:50151"


def failed(*words: str) -> str:
    """What a command that fails writes to standard error."""
    done = command(*words)
    assert done.returncode
    return done.stderr


def test_a_bad_environment_value_names_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_MAX_RUNNING", "many")
    monkeypatch.setenv("PACELINE_TARGET", "gpu-a")
    assert failed("serve").startswith("error: PACELINE_MAX_RUNNING: ")
    monkeypatch.setenv("PACELINE_MAX_RUNNING", "0")
    assert failed("serve").startswith("error: PACELINE_MAX_RUNNING: must be between")
    assert failed("serve", "--max-running", "0").startswith("error: --max-running: must be between")
    assert failed("coordinator", "--tokenizer", "x").startswith("error: PACELINE_TARGET: must be host")


def test_a_variable_holds_several_values_between_commas(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[CoordinatorConfig] = []
    monkeypatch.setattr(serve, "check_coordinator", seen.append)
    monkeypatch.setattr(main, "run", lambda _config: None)
    monkeypatch.setenv("PACELINE_TARGET", "a:1,dns:b:2")
    monkeypatch.setenv("PACELINE_TOKENIZER", "a folder, with a comma")
    assert command("coordinator").returncode == 0
    assert (seen[0].targets, seen[0].tokenizer) == (("a:1", "dns:b:2"), "a folder, with a comma")


def test_messages_name_options_and_keep_paths() -> None:
    said = failed("target-worker", "--model", "embedded:target", "--tls-key", "/a/tls_ca")
    assert said == "error: --tls-certificate: is required with --tls-key\n"
    path = "/no/max_model_len/tls_ca.d"
    assert path in failed("target-worker", "--model", path)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("--model: is gated", "error: --draft-model: is gated\n"),
        ("--max-model-len: must", "error: --max-model-len: must\n"),
        ("--num-blocks: too many", "error: --num-blocks: too many\n"),
        ("--dtype: must", "error: --draft-dtype: must\n"),
        ("--model-of-nobody: must", "error: draft: --model-of-nobody: must\n"),
        ("was killed", "error: draft: was killed\n"),
    ],
)
def test_a_childs_option_is_shown_as_the_stacks(
    said: str, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ChildFailedError("draft", said, 2)

    monkeypatch.setattr(serve, "serve_stack", fail)
    assert failed("serve", "--port", "0", "--http-port", "0", "--num-blocks", "9").endswith(line)


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("PACELINE_TARGT_MODEL", "x", "did you mean PACELINE_TARGET_MODEL?"),
        ("PACELINE_NO_PREFIX_CACHE", "true", "write PACELINE_PREFIX_CACHE=false"),
        ("PACELINE_NO_PREFIX_CACHE", "0", "write PACELINE_PREFIX_CACHE=true"),
        ("PACELINE_QQQQQQQQ", "x", "no option uses this variable"),
    ],
)
def test_an_unknown_variable_is_warned_of(
    name: str, value: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    warning, error = failed("plan", "--k", "99").splitlines()
    assert warning.startswith(f"warning: {name} is set, but no option")
    assert said in warning
    assert error.startswith("error: ")


@pytest.mark.parametrize(
    "name",
    [
        *("PACELINE_LOG_LEVEL", "PACELINE_TARGET_GPU", "PACELINE_BIND", "PACELINE_MODEL", "PACELINE_API_KEY"),
        *("PACELINE_SERVICE_HOST", "PACELINE_SERVICE_PORT", "PACELINE_SERVICE_PORT_GRPC"),
        *("PACELINE_PORT_50151_TCP", "PACELINE_PORT_50151_TCP_ADDR", "PACELINE_HTTP_SERVICE_HOST"),
        *("PACELINE_TEST_PAIR", "OTHER"),
    ],
)
def test_other_prefixed_variables_are_known(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, LINK)
    assert failed("plan", "--k", "99").startswith("error: ")


def test_a_child_does_not_repeat_the_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_TARGT_MODEL", "x")
    words = ("target-worker", "--model", "/no/such")
    assert failed(*words, "--exit-with-parent").startswith("error: ")
    assert "PACELINE_TARGT_MODEL" in failed(*words)


def test_warnings_are_sorted_and_of_our_prefix_only() -> None:
    environment = {"PACELINE_B": "1", "PACELINE_A": "1", "PACE": "1", "PACELINE_K": "1"}
    found = [warning.split()[0] for warning in unknown_variables(["PACELINE_K"], environment)]
    assert found == ["PACELINE_A", "PACELINE_B"]


@pytest.mark.parametrize("file", [compose.MAIN, compose.SECURE, compose.ONE_GPU])
def test_compose_variables_cause_no_warning(file: str) -> None:
    names = re.findall(r"PACELINE_\w*[A-Z]", (ROOT / file).read_text())
    known = [p.envvar for command in COMMANDS.values() for p in command.params if isinstance(p.envvar, str)]
    assert names
    assert unknown_variables(known, dict.fromkeys(names, "1")) == []


@pytest.mark.parametrize("command", sorted(GROUPED_COMMANDS))
def test_every_serving_option_has_a_group(command: str) -> None:
    options = [p.name for p in COMMANDS[command].params if p.param_type_name == "option"]
    assert [name for name in options if name != "help" and group_of(name) is None] == []


def test_help_lists_every_group_with_its_options() -> None:
    result = CliRunner().invoke(cli.app, ["serve", "--help"], env={"COLUMNS": "80"})
    lines = result.output.splitlines()
    titles = [line.removesuffix(":") for line in lines if line[:1].isalpha() and line.endswith(":")]
    assert titles == ["Arguments", *GROUPS, "Options"]
    assert lines.index("Memory:") < next(i for i, s in enumerate(lines) if "--num-blocks" in s)
    assert [line.split()[0] for line in lines[lines.index("Options:") + 1 :] if line] == ["--help"]


def test_no_group_names_a_field_twice() -> None:
    names = [name for group in GROUPS.values() for name in group.split()]
    assert sorted(set(names)) == sorted(names)


@pytest.mark.parametrize(
    ("target", "draft", "model", "pair"),
    [
        ("", None, None, ("embedded:target", "embedded:draft")),
        ("", None, "m/x", ("m/x", "none")),
        ("m/x", None, None, ("m/x", "none")),
        ("m/x", "m/d", "m/x", ("m/x", "m/d")),
        ("", "none", None, ("embedded:target", "none")),
    ],
)
def test_the_model_argument_sets_target_and_draft(
    target: str, draft: str | None, model: str | None, pair: tuple[str, str]
) -> None:
    chosen = serve._with_models(StackOptions(target_model=target, draft_model=draft), model)
    assert (chosen.target_model, chosen.draft_model) == pair


def test_two_targets_are_refused() -> None:
    assert failed("serve", "m/x", "--target-model", "m/y").startswith("error: --target-model: is m/y")


def test_serve_accepts_a_target_like_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[StackConfig] = []

    def serve_stack(config: StackConfig, **_: object) -> None:
        seen.append(config)
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "serve_stack", serve_stack)
    command("serve", "meta-llama/Llama-3.2-1B", "--max-num-seqs", "3", "--max-model-len", "99")
    (config,) = seen
    assert (config.target_model, config.draft_models) == ("meta-llama/Llama-3.2-1B", ())
    assert (config.max_running, config.max_model_len) == (3, 99)
    command("serve", "--draft-model", "a", "--draft-model", "b", "--tree-width", "auto")
    assert (seen[1].draft_models, seen[1].tree_width) == (("a", "b"), "auto")
    monkeypatch.setenv("PACELINE_DRAFT_MODEL", "my models/a,b")
    command("serve")
    assert seen[2].draft_models == ("my models/a", "b")
