"""The command line against real processes: `paceline serve` on a tiny random pair, and its client
commands."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx2
import pytest
from harness.commands import Done, command
from harness.ending import ended
from harness.pair import Pair
from harness.waiting import HANG

MARK = "xylophone quagmire"
"""Must not be logged."""
PACELINE = (sys.executable, "-P", "-m", "paceline")


@dataclass
class Served:
    """A running `paceline serve`."""

    process: subprocess.Popen[str]
    address: str
    http: str
    logs: Path
    """Its standard error, and that of all it started."""

    def paceline(self, *words: str, stdin: str = "") -> Done:
        """A command of a client, in this process."""
        return command(*words, "--address", self.address, stdin=stdin)

    def separately(self, *words: str) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own, as users have it."""
        return paceline(*words, "--address", self.address)


def paceline(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PACELINE, *words], input="", capture_output=True, text=True, timeout=HANG, check=False
    )


def models(pair: Pair) -> list[str]:
    return ["--target-model", str(pair.target), "--draft-model", str(pair.draft)]


@pytest.fixture(scope="module")
def served(tiny_pair: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    ports = ["--port", "0", "--http-port", "0"]
    options = [*models(tiny_pair), *ports, "--num-blocks", "64", "--threads", "1", "--log-format", "json"]
    logs = tmp_path_factory.mktemp("served") / "logs"
    with (
        logs.open("w") as stderr,
        subprocess.Popen(
            [*PACELINE, "serve", *options],
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
            env=os.environ | {"PACELINE_LOG_LEVEL": "DEBUG"},
        ) as process,
    ):
        try:
            assert process.stdout
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("Paceline listens on "):
                    break
            assert lines, logs.read_text()
            url = re.search(r"http://[^/\s]+", "".join(lines))
            assert url is not None, lines
            yield Served(process, lines[-1].split()[-1], url[0], logs)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=HANG)
            process.kill()


def test_generate_prints_the_same_with_and_without_streaming(served: Served) -> None:
    options = ("generate", "def main():", "--max-tokens", "12", "--seed", "3")
    streamed, whole = served.separately(*options), served.paceline(*options, "--no-stream")
    assert (streamed.returncode, streamed.stderr) == (0, "")
    assert streamed.stdout == whole.stdout
    assert len(streamed.stdout) > 1


def test_generate_json_has_the_whole_result(served: Served) -> None:
    done = served.paceline(
        *("generate", "-", "--json", "--max-tokens", "9", "--temperature", "0", "--ignore-eos"),
        stdin="import os\n",
    )
    result = json.loads(done.stdout)
    assert len(result["token_ids"]) == len(result["origins"]) == 9
    assert result["finish_reason"] == "length"
    assert result["usage"]["prompt_tokens"] == len("import os\n")
    assert result["speculative_decoding"]["num_rounds"] <= 9


@pytest.mark.parametrize("acceptance", ["coupled", "rejection", "block"])
def test_speculation_is_chosen_by_request(served: Served, acceptance: str) -> None:
    words = ("generate", "x", "--json", "--max-tokens", "8", "--ignore-eos", "--acceptance", acceptance)
    plain = json.loads(served.paceline(*words, "--num-speculative-tokens", "0").stdout)
    drafted = json.loads(served.paceline(*words, "--num-speculative-tokens", "2").stdout)
    assert plain["acceptance"] == drafted["acceptance"] == acceptance
    assert plain["speculative_decoding"]["num_draft_tokens"] == 0
    assert set(plain["origins"]) == {"target"}
    assert drafted["speculative_decoding"]["num_draft_tokens"] > 0


def test_a_stop_string_ends_the_generation(served: Served) -> None:
    words = ("generate", "x", "--json", "--max-tokens", "30", "--temperature", "0", "--ignore-eos")
    text = json.loads(served.paceline(*words).stdout)["text"]
    stop = next(character for character in text[1:] if character.isascii() and character.isprintable())
    result = json.loads(served.paceline(*words, "--stop", stop).stdout)
    assert result["finish_reason"] == "stop"
    assert result["stop_reason"] == stop
    assert result["text"] == text[: text.index(stop)]


def test_options_request_reports_and_masks(served: Served) -> None:
    words = ("generate", "ab", "--max-tokens", "8", "--seed", "3", "--ignore-eos")
    masks = ("--bad-word", "q", "--bad-word", "z", "--allowed-token-id", "65", "--allowed-token-id", "66")
    reports = ("--n", "2", "--logprobs", "2", "--prompt-logprobs", "0", "--echo")
    result = json.loads(served.paceline(*words, *masks, *reports, "--json").stdout)
    assert len(result["outputs"]) == 2
    for output in result["outputs"]:
        assert set(output["token_ids"]) <= {65, 66}
        assert output["text"].startswith("ab")
        assert [len(position) in (2, 3) for position in output["logprobs"]] == [True] * 8
    assert [position is None for position in result["prompt_logprobs"]] == [True, False]
    printed = served.paceline(*words, *masks, "--n", "2").stdout
    assert printed == "\n\n".join(o["text"].removeprefix("ab") for o in result["outputs"]) + "\n"


def test_status_lists_every_process(served: Served) -> None:
    status = json.loads(served.paceline("status", "--json").stdout)
    assert status["coordinator"]["address"] == served.address
    workers = {worker["role"]: worker for worker in status["workers"]}
    assert set(workers) == {"target", "draft"}
    for worker in workers.values():
        assert worker["state"] == "ready"
        info = worker["info"]
        assert info["vocabulary_size"] == 257
        assert (info["cache"]["total_blocks"], info["cache"]["block_size"]) == (64, 16)
    table = served.separately("status").stdout
    for worker in workers.values():
        assert worker["address"] in table
        assert str(worker["info"]["process_id"]) in table


def test_a_load_test_reports_figures_and_equal_tokens(served: Served, tmp_path: Path) -> None:
    done = served.separately(
        *("loadtest", "--requests", "14", "--concurrency", "4", "--verify", "10", "--seed", "5"),
        *("--max-tokens", "12", "--ignore-eos", "--num-speculative-tokens", "3", "--goal-e2e", str(HANG)),
        *("--json", str(tmp_path / "run.json")),
    )
    assert (done.returncode, done.stderr) == (0, "")
    record = json.loads((tmp_path / "run.json").read_text())
    assert sorted(request["number"] for request in record["requests"]) == list(range(14))
    summary = record["summary"]
    assert (summary["finished"], summary["failed"], summary["most_at_a_time"]) == (14, {}, 4)
    assert summary["completion_tokens"] == 14 * 12
    assert summary["speculation"]["num_accepted_draft_tokens"] > 0
    assert summary["goodput"] == summary["requests_per_second"] > 0
    assert summary["latencies"]["e2e"]["median"] >= summary["latencies"]["ttft"]["median"] > 0
    assert record["verification"] == {"compared": 10, "differences": [], "failures": [], "unasked": 0}
    for line in ("4 at a time", "time to the first token", "draft acceptance rate"):
        assert line in done.stdout


def test_failed_requests_of_a_load_test_are_reported(served: Served, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "import os", "max_tokens": 4}, {"prompt": [256, 65]}, {"prompt": [99_999]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = served.paceline(
        *("loadtest", "--rate", "200", "--requests", "9", "--prompts", str(prompts), "--cold-prompts"),
        *("--max-tokens", "6", "--regex", "[ab]{6}", "--json", str(tmp_path / "run.json")),
    )
    assert done.returncode == 1
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["summary"]["failed"] == {"InvalidArgumentError": 3}
    assert record["summary"]["completion_tokens"] == 3 * 4 + 3 * 6
    note = record["notes"][-1]
    assert note.startswith("InvalidArgumentError: prompt")
    assert note in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("generate", "x", "--stop-token-id", "99999"), "--stop-token-id: "),
        (("generate", "x", "--prompt-logprobs", "1"), "--prompt-logprobs: "),
        (("loadtest", "--stop-token-id", "99999"), "--stop-token-id: "),
        (("loadtest", "--verify", "1", "--acceptance", "rejection"), "--verify: "),
        (("loadtest", "--prompts", "/no/such", "--prompt-tokens", "3"), "--prompt-tokens: "),
        (
            ("loadtest", "--requests", "1", "--json", "/no/such/run.json"),
            "--json: /no/such/run.json cannot be written",
        ),
    ],
)
def test_a_command_that_cannot_work_says_why(served: Served, words: tuple[str, ...], said: str) -> None:
    """In one line, before it prints anything."""
    done = served.paceline(*words)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {said}")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("signals", [(signal.SIGINT,), (signal.SIGINT, signal.SIGINT), (signal.SIGTERM,)])
def test_an_interrupted_load_test_reports_what_was_sent(
    served: Served, tmp_path: Path, signals: tuple[int, ...]
) -> None:
    """Running requests are awaited after the first SIGINT only; otherwise they fail."""

    def finished() -> int:
        status = json.loads(served.paceline("status", "--json").stdout)
        return int(status["coordinator"]["finished_requests"])

    before, file = finished(), tmp_path / "run.json"
    words = ("loadtest", "--duration", "1000", "--concurrency", "2", "--max-tokens", "200", "--ignore-eos")
    with subprocess.Popen(
        [*PACELINE, *words, "--prompt-tokens", "20", "--json", str(file), "--address", served.address],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            while finished() < before + 5:
                assert process.poll() is None
            for number in signals:
                process.send_signal(number)
            shown, errors = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert errors == ""
    assert "completion tokens per second" in shown
    summary = json.loads(file.read_text())["summary"]
    assert summary["finished"] >= 3  # of five, two at most are yet to arrive
    failed = sum(summary["failed"].values())
    if signals == (signal.SIGINT,):
        assert failed == 0
    elif signals == (signal.SIGTERM,):
        assert 0 < failed <= 2
    else:
        assert failed <= 2  # two of a signal may arrive as one
    assert process.returncode == bool(summary["failed"])


def test_every_process_is_healthy(served: Served) -> None:
    status = json.loads(served.paceline("status", "--json").stdout)
    for address in (served.address, *(worker["address"] for worker in status["workers"])):
        done = command("health", address)
        assert (done.returncode, done.stdout, done.stderr) == (0, "SERVING\n", "")
    unknown = command("health", served.address, "--service", "no.Such")
    assert unknown.returncode == 1
    assert unknown.stderr.startswith("error: ")


def test_sigterm_ends_serve_and_logs_hold_no_prompt(served: Served) -> None:
    """Three processes and their supervisor on one standard error."""
    for values in ({"max_tokens": 8}, {"max_tokens": -1}, {"model": MARK}, {"stop": MARK, "stream": True}):
        httpx2.post(f"{served.http}/v1/completions", json={"prompt": MARK, **values}, timeout=HANG)
    status = json.loads(served.paceline("status", "--json").stdout)
    pids = [status["coordinator"]["process_id"], *(w["info"]["process_id"] for w in status["workers"])]
    served.process.terminate()
    served.process.terminate()
    assert served.process.wait(HANG) == 0
    assert all(ended(pid, HANG) for pid in pids)
    logs = served.logs.read_text()
    lines = [json.loads(line) for line in logs.splitlines()]
    assert {"target", "draft", "coordinator"} <= {line["role"] for line in lines}
    assert sum(line["message"] == "call ended" for line in lines) >= 4
    assert "xylophone" not in logs
    assert "quagmire" not in logs


def test_serve_names_a_missing_model(tiny_pair: Pair) -> None:
    done = paceline(
        "serve", "--target-model", str(tiny_pair.target), "--draft-model", "/no/such", "--port", "0"
    )
    assert done.returncode != 0
    assert re.fullmatch(r"error: --draft-model: .*/no/such.*", done.stderr.strip().splitlines()[-1])


def test_a_worker_names_a_missing_model() -> None:
    done = paceline("target-worker", "--model", "/no/such")
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: --model: ")


def test_the_demo_runs_without_a_terminal(tiny_pair: Pair) -> None:
    done = paceline("demo", *models(tiny_pair), "--max-tokens", "24", "--pairs", "1", "--prompt", "import")
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for line in ("tokens per second", "acceptance rate", "accepted at position 1", "wire", "Theorem 3.8"):
        assert line in done.stdout
    assert "Both ways gave the same 24 tokens." in done.stdout
    assert all(ended(int(pid), HANG) for pid in re.findall(r"pid (\d+)", done.stdout))


def test_an_interrupt_ends_the_demo_and_its_processes(tiny_pair: Pair) -> None:
    words = [*PACELINE, "demo", *models(tiny_pair), "--max-tokens", "100", "--pairs", "1000"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout
            shown = ""
            while "def read_config" not in shown:  # of the prompt: the completion streams
                line = process.stdout.readline()
                assert line, process.communicate(timeout=HANG)
                shown += line
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=HANG)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in errors
    pids = [int(pid) for pid in re.findall(r"pid (\d+)", shown)]
    assert len(pids) == 3
    assert all(ended(pid, HANG) for pid in pids)
