"""Every command on every page runs, or is parsed for a reason given here.

Shell blocks run one by one, each in a folder of its own. `paceline serve` and its parts are started on free
ports and stopped when their block ends. Commands of a client ask the servers of their block, else one stack
that all blocks share. Python blocks of a page run one after another, with the names of those before.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import inspect
import io
import itertools
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
from harness import parsing
from harness.pages import PAGES, ROOT, Block, Statement, blocks, inline_codes, statements
from harness.pair import Pair
from harness.stacks import sound_stack
from harness.waiting import HANG, until

from paceline.certificates import make_certificates
from paceline.client import AsyncClient, Client

SHELL = ("", "sh", "bash", "console")
PYTHON = ("python",)
OTHERS = ("text", "json", "jinja", "proto", "yaml")
"""Languages of blocks that do not run. Commands after a prompt in them, mostly with an error below them, are
parsed."""

RUN = (
    "paceline certificates",
    "paceline chat",
    "paceline generate",
    "paceline health",
    "paceline keys",
    "paceline loadtest",
    "paceline plan",
    "paceline profile",
    "paceline status",
    "curl",
)
BUILTINS = ("exec", "export", "(umask")
READY = {
    "paceline serve": "Paceline listens on ",
    "paceline target-worker": "worker listening on ",
    "paceline draft-worker": "worker listening on ",
    "paceline coordinator": "the coordinator listens on ",
}
"""What each server writes when it serves."""
DEFAULTS = (
    "--target-model embedded:target --draft-model embedded:draft",
    "--target-device cpu",
    "--draft-device cpu",
)
"""Options of `paceline serve` that change nothing here."""
PARSED: dict[str, tuple[Callable[[Sequence[str]], None], str]] = {
    "make": (
        parsing.make,
        "installs, and takes minutes to hours; recipes are shown, `paceline` in them parsed",
    ),
    "pip install": (parsing.pip_install, "asks a package index"),
    "docker compose": (parsing.docker_compose, "needs an engine; test_compose.py runs what the services run"),
    "docker run": (parsing.docker_run, "needs an engine, and an image of others"),
    "ray start": (lambda _words: None, "needs Ray, and leaves it running"),
    "serve": (parsing.ray_serve, "needs a Ray cluster; tests/ray runs the manifest on one"),
    "paceline bench": (lambda words: parsing.paceline(("bench", *words)), "takes minutes to hours"),
    "paceline measure": (lambda words: parsing.paceline(("measure", *words)), "takes minutes"),
    "python -m": (parsing.python_module, "measures for minutes, or needs a GPU"),
}
"""What does not run here: how it is parsed instead, and why it does not run. A command with `…` in it is
parsed as well, whatever it is of `paceline`."""

SUBSTITUTIONS = (
    (r"(?<=\S) {2,}(?=\S)", " "),
    # Where servers listen.
    (r"\b50151\b", "{port}"),
    (r"\b50152\b", "{target_port}"),
    (r"\b50153\b", "{draft_port}"),
    (r"(?<=[: ])8000\b", "{http_port}"),
    (r"\b0\.0\.0\.0\b|\b(?:gpu-a|gpu-b|HOST)(?=:)|\bHOST_THAT_CLIENTS_USE\b", "127.0.0.1"),
    # Models and devices.
    (r"\S*Llama\S*-1B\S*?(?='|\s|$)", "embedded:draft"),
    (r"\S*Llama\S*-3B\S*?(?='|\s|$)", "embedded:target"),
    (r"(?<=--draft-model )(?:DIR_OR_ID|ID)\b|(?<=draft-worker --model )ID\b", "embedded:draft"),
    (r"\b(?:DIR_OR_ID|ID)\b", "embedded:target"),
    (r"(?<= )paceline/assets/(target|draft)\b", r"embedded:\1"),
    (r"\bcuda:\d", "cpu"),
    # Less of the same.
    (r"^curl ", "curl --silent --show-error --fail-with-body "),
    (r"^paceline loadtest", "paceline loadtest --requests 6 --max-tokens 8"),
    (r"(?<= )--requests \d+", "--requests 6"),
    (r"(?<= )--duration \d+", "--duration 1"),
    (r"(?<= )--(prompt|max)-tokens \d{3,}", r"--\1-tokens 64"),
    # A device that root alone may open.
    (r"/dev/cpu_dma_latency", "latency"),
)
"""What a page says, and what stands for it here; braces are filled in by `Places`."""

ENVIRONMENT = {"PACELINE_NUM_BLOCKS": "256", "PACELINE_TARGET_THREADS": "1", "PACELINE_DRAFT_THREADS": "1"}
"""For servers: what keeps several of them small."""

FOREIGN_OPTIONS = {
    "--build": "docker compose",
    "--cpus": "docker run",
    "--index-url": "pip",
    "--list": "tools.gpu_check",
    "--minutes": "tools.gpu_check",
    "--out": "tools.gpu_check",
    "--pretend": "tools.gpu_check",
    "--profile": "docker compose",
    "--rm": "docker compose",
    "--scale": "docker compose",
    "--seeds": "tests.sim.policy",
    "--no-x": "stands for any",
    "--x": "stands for any",
    "--speculative-config": "vLLM's, which `paceline serve` reads by itself",
}
"""Options in sentences that are none of `paceline`."""

HISTORY = re.compile(r"docs/(?:taken-out|benchmarks-[\w-]+)\.md")
"""Pages of old versions, whose commands are gone."""

pytestmark = pytest.mark.timeout(900)

TEMPLATE = "{{ messages[-1]['content'] }}\n"


@dataclass(frozen=True)
class Places:
    """Ports that stand for those of the pages."""

    port: int
    http_port: int
    target_port: int
    draft_port: int

    @classmethod
    def free(cls) -> Places:
        """Of nobody yet."""
        with contextlib.ExitStack() as opened:
            sockets = [opened.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(4)]
            return cls(*(each.getsockname()[1] for each in sockets))

    def put_into(self, text: str) -> str:
        """The command as it runs here."""
        for pattern, replacement in SUBSTITUTIONS:
            text = re.sub(pattern, replacement, text)
        for name, value in vars(self).items():
            text = text.replace("{" + name + "}", str(value))
        return text


ALL = [
    block
    for page in PAGES
    if not HISTORY.fullmatch(page)
    for block in blocks(page, (ROOT / page).read_text())
]
PYTHON_PAGES = sorted({block.page for block in ALL if block.language in PYTHON})


def as_served(statement: Statement, block: Sequence[Statement]) -> str:
    """The same text for commands that start the same servers, variables of the block put in."""
    text = statement.text
    for name, _, value in (word.partition("=") for each in block for word in each.assignments):
        text = text.replace(f"${name}", value)
    text = " ".join(shlex.split(Places(0, 0, 0, 0).put_into(text), comments=True))
    for default in DEFAULTS:
        text = text.replace(f" {default}", "")
    return text


def shell_blocks() -> Iterator[Any]:
    """As parameters: each block, and the servers that are parsed in it, for they start in one before.

    Where a client follows in the same block, they start.
    """
    started: set[str] = set()
    for block in ALL:
        if block.language in SHELL:
            found = statements(block.text)
            servers = {as_served(each, found) for each in found if each.text.startswith(tuple(READY))}
            is_asked = any(each.text.startswith(RUN) for each in found)
            yield pytest.param(block, frozenset() if is_asked else frozenset(started), id=block.where)
            started |= servers


def kind(words: Sequence[str]) -> str:
    """The first words that some table above has. Raises AssertionError for a command that none has."""
    for count in (2, 1):
        name = " ".join(words[:count])
        if any(name in names for names in (RUN, BUILTINS, READY, PARSED)):
            return name
    raise AssertionError(
        f"nobody runs `{' '.join(words)}`: give it a kind in test_page_commands.py, "
        "or the block a language (`text` for a drawing)"
    )


def check(words: Sequence[str]) -> None:
    """Parse a command that does not run."""
    name = kind(words)
    if name in PARSED:
        PARSED[name][0](words[len(name.split()) :])
    elif words[0] == "paceline":
        # Behind an option it stands for a value.
        told = [word for last, word in itertools.pairwise(words) if word != "…" or last.startswith("--")]
        parsing.paceline(told, elided=True)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What commands on the pages read: each block gets a copy."""
    folder = tmp_path_factory.mktemp("files")
    (folder / "prompt.txt").write_text("def main():\n")
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "keys.json").write_text('{"keys": []}')
    made = make_certificates(folder / "made")
    assert made
    shutil.copy(folder / "made/ca.pem", folder)
    shutil.rmtree(folder / "made")
    return folder


@pytest.fixture(scope="module")
def shared(pair_paths: Pair, files: Path) -> Iterator[Places]:
    """The stack that clients on the pages ask, with a chat template."""
    with sound_stack(pair_paths, chat_template=str(files / "template.jinja"), max_model_len=512) as running:
        assert running.stack.http_address is not None
        port, http_port = (
            int(address.rpartition(":")[2]) for address in (running.address, running.stack.http_address)
        )
        yield Places(port, http_port, 0, 0)


@dataclass
class Shell:
    """What runs the statements of one block."""

    folder: Path
    shared: Places
    own: Places = field(default_factory=Places.free)
    servers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    assigned: list[str] = field(default_factory=list)

    def run(self, statement: Statement) -> None:
        """Raises AssertionError with what it printed."""
        if statement.words[:1] in ((), ("export",)):
            self.assigned.append(statement.text)
            return
        name = kind(statement.words)
        if name in PARSED or statement.elided:
            check(statement.words)
        elif name in READY:
            self._start(name, statement)
        else:
            self._wait_until_served()
            self._ask(statement)

    def finish(self) -> None:
        """Servers have come up, and end when they are told to."""
        self._wait_until_served()
        self._stop()

    def _script(self, statement: Statement, places: Places) -> str:
        return "\n".join(places.put_into(text) for text in (*self.assigned, statement.text))

    def _environment(self, places: Places) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if not name.startswith("PACELINE_")}
        path = f"{Path(sys.executable).parent}{os.pathsep}{own['PATH']}"
        return own | {"PATH": path, "PACELINE_ADDRESS": f"127.0.0.1:{places.port}"}

    def _ask(self, statement: Statement) -> None:
        program = statement.words[0]
        if program in ("curl", "openssl") and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
        places = self.own if self.servers else self.shared
        done = subprocess.run(
            ["bash", "-euc", self._script(statement, places)],
            cwd=self.folder,
            env=self._environment(places),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=HANG,
            check=False,
        )
        assert done.returncode == 0, f"{statement.text}\n{done.stdout}{done.stderr}"

    def _start(self, name: str, statement: Statement) -> None:
        if name == "paceline serve" or name in self.servers:  # another way to do the same
            self._wait_until_served()
            self._stop()
        script = self._script(statement, self.own)
        begin = script.rindex("paceline ")
        ports = {"PACELINE_PORT": str(self.own.port), "PACELINE_HTTP_PORT": str(self.own.http_port)}
        with (self.folder / f"{name}.log").open("w") as log:
            self.servers[name] = subprocess.Popen(
                ["bash", "-euc", f"{script[:begin]}exec {script[begin:]}"],
                cwd=self.folder,
                env=self._environment(self.own) | ENVIRONMENT | (ports if name == "paceline serve" else {}),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def _wait_until_served(self) -> None:
        for name, process in self.servers.items():
            log = self.folder / f"{name}.log"

            def serves(name: str = name, log: Path = log, process: subprocess.Popen[bytes] = process) -> bool:
                assert process.poll() is None, log.read_text()
                return READY[name] in log.read_text()

            until(serves, f"{name} serving")

    def _stop(self) -> None:
        for process in self.servers.values():
            process.terminate()
        for name, process in self.servers.items():
            code = process.wait(HANG)
            assert code == 0, f"{name} ended with {code}: {(self.folder / f'{name}.log').read_text()}"
        self.servers.clear()


@contextlib.contextmanager
def shell(folder: Path, shared: Places) -> Iterator[Shell]:
    """Whatever happens, no server outlives its block."""
    running = Shell(folder, shared)
    try:
        yield running
        running.finish()
    finally:
        for process in running.servers.values():
            process.kill()
            process.wait()


@pytest.mark.parametrize(("block", "started"), list(shell_blocks()))
def test_shell_blocks_run(
    block: Block, started: frozenset[str], files: Path, shared: Places, folder: Path
) -> None:
    shutil.copytree(files, folder, dirs_exist_ok=True)
    for template in (each for each in ALL if (each.page, each.language) == (block.page, "jinja")):
        (folder / "template.jinja").write_text(template.text)
    with shell(folder, shared) as running:
        found = statements(block.text)
        for statement in found:
            if as_served(statement, found) in started:
                check(statement.words)
            else:
                running.run(statement)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_python_blocks_of_a_page_run(
    page: str, files: Path, shared: Places, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(files, folder, dirs_exist_ok=True)
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PACELINE_API_KEY", "pl-none")
    names: dict[str, Any] = {}
    with contextlib.ExitStack() as opened:
        ours = opened.enter_context(Client(f"127.0.0.1:{shared.port}"))
        for block in ALL:
            if block.page == page and block.language in PYTHON:
                run_python(block, shared, names)
                client = names.get("client")
                if client is not None and client is not ours:
                    if isinstance(client, Client | openai.OpenAI):
                        opened.callback(client.close)
                    if isinstance(client, Client | AsyncClient):  # closed, or of a server that is not here
                        names["client"] = ours


def run_python(block: Block, places: Places, names: dict[str, Any]) -> None:
    """One block, with the lines of its page in what it raises; it may await."""
    text = "\n" * block.line + places.put_into(block.text)
    code = compile(text, block.page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
    with contextlib.redirect_stdout(io.StringIO()):
        awaited = eval(code, names)
        if inspect.iscoroutine(awaited):
            asyncio.run(awaited)


def test_every_block_has_a_known_language() -> None:
    known = (*SHELL, *PYTHON, *OTHERS)
    assert [f"{b.where} {b.language}" for b in ALL if b.language not in known] == []


def test_commands_in_unrun_blocks_parse() -> None:
    for block in ALL:
        if block.language in OTHERS and re.search(r"^(?:[\w-]*)\$ ", block.text, re.MULTILINE):
            for statement in statements(block.text):
                check(statement.words)


@pytest.mark.parametrize("page", PAGES)
def test_commands_in_sentences_parse(page: str) -> None:
    """Only names are checked: values may be left out there."""
    if HISTORY.fullmatch(page):
        return
    for code in inline_codes((ROOT / page).read_text()):
        name = next((name for name in PARSED if code.startswith(f"{name} ")), "")
        if code.startswith("paceline "):
            parsing.paceline_options(shlex.split(code)[1:])
        elif name:
            PARSED[name][0](shlex.split(code)[len(name.split()) :])


def test_options_in_sentences_exist() -> None:
    known = {*parsing.options(parsing.command_line()), "--help", *FOREIGN_OPTIONS}
    unknown = [
        f"{page}: {option}"
        for page in PAGES
        if not HISTORY.fullmatch(page)
        for code in inline_codes((ROOT / page).read_text())
        for option in re.findall(r"(?<![\w-])--[a-z][\w-]*(?![\w*-])", code)
        if option not in known
    ]
    assert unknown == []


@pytest.mark.planted
@pytest.mark.parametrize(
    "text",
    [
        "kubectl apply -f x.yml",
        "paceline bench --no-such",
        "paceline bench --k x",
        "paceline target-worker … --no-such x",
        "paceline nothing",
        "make nothing",
        "pip install '.[nothing]'",
        "pip install --no-such .",
        "docker compose up nothing",
        "docker compose --profile nothing up",
        "docker compose up --scale target-worker=2 coordinator-cpu",
        "docker compose run --rm loadtest --no-such",
        "docker compose exec coordinator paceline generate --no-such",
        'docker run -v "$PWD/nothing:/x" image',
        "python -m paceline.nothing",
    ],
)
def test_a_wrong_command_is_noticed(text: str) -> None:
    (statement,) = statements(text)
    with pytest.raises(AssertionError):
        check(statement.words)


@pytest.mark.planted
def test_a_failing_shell_block_is_noticed(files: Path, folder: Path) -> None:
    with shell(folder, Places(1, 2, 3, 4)) as running, pytest.raises(AssertionError, match="no-such"):
        running.run(statements("$ paceline keys list --api-keys no-such.json\noutput")[0])
