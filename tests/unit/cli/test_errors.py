"""Errors of commands: one line, and an exit code."""

from __future__ import annotations

import subprocess
import sys

import pytest

from paceline.cli import app as cli
from paceline.core import errors
from paceline.supervisor import ChildFailedError


def run(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as end:
        cli.main(words)
    captured = capsys.readouterr()
    code = end.value.code
    assert isinstance(code, int) or code is None
    return code or 0, captured.out, captured.err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target-worker"], "--model: is required"),
        (["coordinator", "--target", "a:1"], "--tokenizer: is required"),
        (
            ["coordinator", "--target", "gpu-a", "--tokenizer", "x"],
            "--target: must be host:port, got 'gpu-a'",
        ),
        (
            ["coordinator", "--target", "a:1", "--draft", "b:0", "--tokenizer", "x"],
            "--draft: must be host:port, got 'b:0'",
        ),
        (
            ["coordinator", "--target", "a:1", "--target", "a:1", "--tokenizer", "x"],
            "--target: a:1 is given twice",
        ),
        (["draft-worker", "--model", "x", "--block-size", "0"], "--block-size: must be at least 1"),
        (["serve", "--target-port", "70000"], "--target-port: must be in [0, 65535], got 70000"),
        (["serve", "--port", "-1"], "--port: must be in [0, 65535], got -1"),
        (["serve", "--target-dtype", "int4"], "--target-dtype: must be one of"),
        (
            ["serve", "--num-speculative-tokens", "some"],
            "--num-speculative-tokens: 'some' is neither an integer nor 'auto'",
        ),
        (["serve", "--num-speculative-tokens", "99"], "--num-speculative-tokens: must be between 0 and 32"),
        (
            ["serve", "--draft-model", "none", "--lookahead-branches", "4"],
            "--lookahead-branches: requires a draft worker, but --draft-model is none",
        ),
        (["target-worker", "--model", "x", "--support-mass", "0.9"], "No such option: --support-mass"),
        (["draft-worker", "--model", "x", "--no-pre-verify"], "No such option: --no-pre-verify"),
        (["serve", "--acceptance", "magic"], "--acceptance: 'magic' is not one of"),
        (["generate"], "PROMPT: is required"),
        (["generate", "x", "--temperature", "-1"], "--temperature: must be "),
        (["generate", "x", "--top-k", "many"], "--top-k: "),
        (["generate", "x", "--timeout", "0", "--no-stream"], "--timeout: must be "),
        (["plan", "--alpha", "1.5"], "--alpha: must be in [0, 1], got 1.5"),
        (["plan", "--k", "17"], "--k: must be in [0, 16], got 17"),
        (["demo", "--max-tokens", "0"], "--max-tokens: must be "),
        (["demo", "--pairs", "0"], "--pairs: must be at least 1, got 0"),
        (["--wrong"], "No such option: --wrong"),
        (["health", "127.0.0.1:1", "--api-key", "pl-x"], "No such option: --api-key"),
        (["sing"], "No such command 'sing'."),
    ],
)
def test_bad_arguments_give_one_line_and_code_2(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(("words", "listed"), [([], "target-worker"), (["keys"], "remove")])
def test_a_group_without_a_command_prints_its_help(
    words: list[str], listed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    _, wanted, _ = run([*words, "--help"], capsys)
    assert err == wanted
    assert err.startswith("Usage: ")
    assert any(line.split()[:1] == [listed] for line in err.splitlines())


@pytest.mark.parametrize(
    "words",
    [["coordinator", "--target", "a:1", "--tokenizer", "x"], ["serve"], ["serve", "--log-format", "json"]],
)
def test_an_invalid_log_level_is_a_bad_argument(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "verbose")
    code, out, err = run(words, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: log_level: PACELINE_LOG_LEVEL must be DEBUG, ")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (errors.InvalidArgumentError("seed", "is odd"), 2, "error: seed: is odd\n"),
        (errors.TokenizerMismatchError("draft_model", "other"), 2, "error: draft_model: other\n"),
        (errors.UnavailableError("nobody\nis  there"), 1, "error: nobody is there\n"),
        (ChildFailedError("draft", "model: no such folder", 2), 2, "error: draft: model: no such folder\n"),
        (OSError(28, "No space left"), 1, "error: [Errno 28] No space left\n"),
        (
            ModuleNotFoundError("No module", name="torch"),
            1,
            "error: this command requires the module torch: install paceline[all]\n",
        ),
    ],
)
def test_each_error_has_its_line_and_exit_code(
    error: Exception,
    code: int,
    line: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(**_: object) -> None:
        raise error

    monkeypatch.setattr("paceline.cli.commands.plan.make_plan", lambda *_args, **_options: fail())
    assert run(["plan"], capsys) == (code, "", line)


def test_an_unexpected_error_keeps_its_traceback(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("paceline.cli.commands.plan.make_plan", None)
    with pytest.raises(TypeError):
        cli.main(["plan"])


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--version"], capsys)
    assert code == 0
    assert out.startswith("paceline ")


def test_a_missing_server_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["status", "--address"], ["health"]):
        code, out, err = run([*words, "127.0.0.1:1"], capsys)
        assert (code, out) == (1, "")
        assert err.startswith("error: ")
        assert "Connection refused" in err


@pytest.mark.slow
def test_commands_without_a_model_do_not_load_torch() -> None:
    check = "import sys, paceline.cli.app; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
