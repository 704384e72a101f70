"""Errors of commands: one line, and an exit code."""

from __future__ import annotations

import pytest
from harness.commands import Done, command, python

from paceline.cli import app as cli
from paceline.core import errors
from paceline.supervisor import ChildFailedError

COORDINATOR = ["coordinator", "--tokenizer", "x", "--target"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["target-worker"], "--model: is required"),
        (["coordinator", "--target", "a:1"], "--tokenizer: is required"),
        ([*COORDINATOR, "gpu-a"], "--target: must be host:port, got 'gpu-a'"),
        ([*COORDINATOR, "a:1", "--draft", "b:0"], "--draft: must be host:port, got 'b:0'"),
        ([*COORDINATOR, "a:1", "--target", "a:1"], "--target: a:1 is given twice"),
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
        (["measure", "--max-tokens", "1"], "--max-tokens: must be at least 2, got 1"),
        (["measure", "--temperature", "-1"], "--temperature: must be "),
        (["measure", "--max-k", "99"], "--max-k: must be in [1, 32], got 99"),
        (["measure", "--target-model", "./none"], "--target-model: ./none: no such folder"),
        (["measure", "--draft-model", "./none"], "--draft-model: ./none: no such folder"),
        (
            ["measure", "--draft-model", "none"],
            "--draft-model: with none, at least one --drafter is required",
        ),
        (
            ["measure", "--draft-model", "none", "--draft-model", "a"],
            "--draft-model: none cannot be combined",
        ),
        (["measure", "--target-model", "a/b"], "--draft-model: is required for the target a/b"),
        (["measure", "--drafter", "magic"], "--drafter: must be one of unigram, bigram, "),
        (["measure", "--drafter", "model"], "--drafter: must be one of unigram, bigram, "),
        (["measure", "--drafter", "ngram", "--corpus", "x"], "--corpus: is not read by any of the drafters"),
        (["measure", "--prompts", "/none"], "--prompts: /none cannot be read"),
        (["measure", "--json", "/none/m.json"], "--json: /none/m.json cannot be written"),
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
def test_bad_arguments_give_one_line_and_code_2(words: list[str], message: str) -> None:
    check_refused(words, message)


def check_refused(words: list[str], message: str) -> None:
    done = command(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {message}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(("words", "listed"), [([], "target-worker"), (["keys"], "remove")])
def test_a_group_without_a_command_prints_its_help(words: list[str], listed: str) -> None:
    shown = command(*words, "--help").stdout
    assert command(*words) == Done(2, "", shown)
    assert shown.startswith("Usage: ")
    assert any(line.split()[:1] == [listed] for line in shown.splitlines())


@pytest.mark.parametrize("words", [[*COORDINATOR, "a:1"], ["serve"], ["serve", "--log-format", "json"]])
def test_an_invalid_log_level_is_a_bad_argument(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PACELINE_LOG_LEVEL", "verbose")
    check_refused(words, "log_level: PACELINE_LOG_LEVEL must be DEBUG, ")


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
    error: Exception, code: int, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("paceline.cli.commands.plan.make_plan", fail)
    assert command("plan") == Done(code, "", line)


def test_an_unexpected_error_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("paceline.cli.commands.plan.make_plan", None)
    with pytest.raises(TypeError):
        cli.main(["plan"])


def test_the_version_is_printed() -> None:
    done = command("--version")
    assert done.returncode == 0
    assert done.stdout.startswith("paceline ")


def test_a_missing_server_is_reported() -> None:
    for words in (["status", "--address"], ["health"]):
        done = command(*words, "127.0.0.1:1")
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr.startswith("error: ")
        assert "Connection refused" in done.stderr


@pytest.mark.slow
def test_commands_without_a_model_do_not_load_torch() -> None:
    check = "import sys, paceline.cli.app; sys.exit('torch' in sys.modules or 'tokenizers' in sys.modules)"
    assert python(check).returncode == 0
