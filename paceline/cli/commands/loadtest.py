"""`paceline loadtest`: send load to a running service and report the results."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.connecting import DEFAULT_ADDRESS, Address, StreamConnection
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.cli.printing import to_stderr, to_stdout
from paceline.cli.structuring import Structure
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest import PROMPTS, LoadConfig, LoadTest, Report, print_report, read_prompts
from paceline.supervisor.preflight import check_writable


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(loadtest)


@options_from_fields
def loadtest(
    load: LoadConfig,
    sampling: Annotated[SamplingParams, Defaults({"max_tokens": 128})],
    speculation: SpeculationParams,
    structure: Structure,
    connection: StreamConnection,
    address: Address = DEFAULT_ADDRESS,
    prompts: Annotated[
        Path | None,
        option(
            "prompts", "JSON lines with prompt and optional max_tokens; the default is a few short prompts."
        ),
    ] = None,
    json: Annotated[Path | None, option("json", "Write all results to this file.", dir_okay=False)] = None,
) -> None:
    """Send load to a running service. Reports rates, latencies, failures and, with --verify, changed tokens.

    Ctrl-C ends the test early and waits for running requests; a second Ctrl-C or SIGTERM does not wait. Both
    print a report. The exit code is 1 if a request failed or a verified answer differs.
    """
    if prompts is not None and load.prompt_tokens is not None:
        raise InvalidArgumentError("prompt_tokens", "cannot be used with --prompts")
    lines, sampling = PROMPTS if prompts is None else read_prompts(prompts), structure.of(sampling)
    if json is not None:
        check_writable("json", json)  # before the load

    async def run(progress: Callable[[str], None]) -> Report:
        async with connection.client(address) as client:
            test = LoadTest(client, load, lines, sampling, speculation, progress)
            with _ended_by_signals(test):
                return await test.run()

    with to_stderr().status("") as status:
        report = asyncio.run(run(status.update))
    print_report(report, to_stdout())
    if json is not None:
        report.write(json)
    if not report.sound:
        raise typer.Exit(1)


@contextlib.contextmanager
def _ended_by_signals(test: LoadTest) -> Iterator[None]:
    """Inside the block, Ctrl-C stops the test; a second Ctrl-C or SIGTERM also ends running requests."""
    loop = asyncio.get_running_loop()

    def interrupted() -> None:
        if test.stopped:
            test.cut()
        else:
            test.stop()

    handlers = {signal.SIGINT: interrupted, signal.SIGTERM: test.cut}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
