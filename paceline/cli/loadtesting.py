"""`paceline loadtest`: send load to a service that runs, and tell what came."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from paceline.cli.connecting import DEFAULT_ADDRESS, Address, Connection
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.cli.printing import to_stderr, to_stdout
from paceline.client import AsyncClient
from paceline.core.types import SamplingParams, SpeculationParams
from paceline.loadtest import PROMPTS, LoadConfig, LoadTest, Report, print_report, read_prompts

_INTERRUPTED = 130  # as shells tell it


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(loadtest)


@options_from_fields
def loadtest(
    load: LoadConfig,
    sampling: Annotated[SamplingParams, Defaults({"max_tokens": 128})],
    speculation: SpeculationParams,
    connection: Connection,
    address: Address = DEFAULT_ADDRESS,
    prompts: Annotated[
        Path | None,
        option(
            "prompts", "JSON lines, each with prompt and perhaps max_tokens; a few short ones if not given."
        ),
    ] = None,
    json: Annotated[Path | None, option("json", "Write everything to this file.", dir_okay=False)] = None,
) -> None:
    """Send load to a service that runs: rates, latencies, failures, and whether a draft changed any token.

    Ctrl-C ends it early, with the report of what was sent; a second one without. The exit code is 1 if a
    request failed or an answer was another one without a draft.
    """
    lines = PROMPTS if prompts is None else read_prompts(prompts)

    async def run(progress: Callable[[str], None]) -> Report:
        async with AsyncClient(address, tls=connection.settings, api_key=connection.api_key) as client:
            test = LoadTest(client, load, lines, sampling, speculation, progress)
            with _stopped_by_signals(test):
                return await test.run()

    try:
        with to_stderr().status("") as status:
            report = asyncio.run(run(status.update))
    except asyncio.CancelledError:
        raise typer.Exit(_INTERRUPTED) from None
    print_report(report, to_stdout())  # first: a file that cannot be written loses nothing then
    if json is not None:
        report.write(json)
    if not report.sound:
        raise typer.Exit(1)


@contextlib.contextmanager
def _stopped_by_signals(test: LoadTest) -> Iterator[None]:
    """While inside, Ctrl-C and SIGTERM stop the test, and a second Ctrl-C cancels what runs.

    Further SIGTERMs change nothing: `timeout`, for one, sends it to the process and then to its group.
    """
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    assert task is not None

    def interrupted() -> None:
        if test.stopped:
            task.cancel()
        test.stop()

    handlers = {signal.SIGINT: interrupted, signal.SIGTERM: test.stop}
    for number, handler in handlers.items():
        loop.add_signal_handler(number, handler)
    try:
        yield
    finally:
        for number in handlers:
            loop.remove_signal_handler(number)
