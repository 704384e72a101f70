"""`paceline generate` and `paceline status`."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from paceline.cli.connecting import DEFAULT_ADDRESS, Address, Connection, StreamConnection
from paceline.cli.options import Defaults, option, options_from_fields
from paceline.cli.printing import to_stdout
from paceline.cli.structuring import Structure
from paceline.client import Client
from paceline.client.reaching import checked_addresses
from paceline.client.server_status import CacheInfo, CoordinatorStatus, ServerStatus, WorkerInfo, WorkerStatus
from paceline.core.errors import InvalidArgumentError, PacelineError
from paceline.core.limits import MAX_PROMPT_CHARACTERS
from paceline.core.types import SamplingParams, SpeculationParams

Json = Annotated[bool, option("json", "Print one JSON object.")]


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(generate)
    app.command()(status)


@options_from_fields
def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt, or - to read it from standard input.")],
    sampling: Annotated[SamplingParams, Defaults({"max_tokens": 128})],
    speculation: SpeculationParams,
    structure: Structure,
    connection: StreamConnection,
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
    cache_salt: Annotated[str, option("cache_salt", "Share cached prefixes only with the same salt.")] = "",
    no_stream: Annotated[bool, option("no_stream", "Print the text when it is complete.")] = False,
    timeout: Annotated[float | None, option("timeout", "Seconds for the whole generation.")] = None,
) -> None:
    """Continue a prompt. The text streams to standard output; several completions come at the end."""
    for name in ("logprobs", "prompt_logprobs"):
        if getattr(sampling, name) is not None and not as_json:
            raise InvalidArgumentError(name, "are only printed with --json")
    sampling = structure.of(sampling)
    streams = not (as_json or no_stream or sampling.n > 1)
    text = sys.stdin.read(MAX_PROMPT_CHARACTERS + 1) if prompt == "-" else prompt

    async def run() -> None:
        async with connection.client(address) as client:
            stream = client.stream(
                text, sampling, speculation=speculation, cache_salt=cache_salt, timeout=timeout
            )
            async for chunk in stream:
                if streams:
                    print(chunk.text, end="", flush=True)
        result = stream.result
        assert result is not None
        if as_json:
            print(json.dumps(result.to_dict(), ensure_ascii=False))
        else:
            print("" if streams else "\n\n".join(output.text for output in result.outputs))

    # asyncio turns Ctrl-C into a cancellation. A KeyboardInterrupt inside gRPC could make it hang.
    asyncio.run(run())


@options_from_fields
def status(
    connection: Connection,
    address: Address = DEFAULT_ADDRESS,
    as_json: Json = False,
    timeout: Annotated[float, option("timeout", "Seconds to wait for the answer.")] = 10.0,
) -> None:
    """Show every process: role, address, model, cache use and state. Several coordinators are shown one after
    another."""
    failure: PacelineError | None = None
    shown = False
    for each in checked_addresses(address):
        try:
            with Client(each, tls=connection.settings, api_key=connection.api_key) as client:
                answer = client.status(timeout=timeout)
        except PacelineError as error:
            failure = failure or error
        else:
            _show(answer, connection, as_json=as_json, follows=shown)
            shown = True
    if failure is not None:
        raise failure


def _show(answer: ServerStatus, connection: Connection, *, as_json: bool, follows: bool) -> None:
    if as_json:
        print(json.dumps(answer.to_dict(), ensure_ascii=False))
        return
    console = to_stdout()
    if follows:
        console.print()
    console.print(status_table(answer))
    scheme = "http" if connection.settings is None else "https"
    console.print(f"\n{_summary(answer, scheme)}")


def status_table(answer: ServerStatus) -> Table:
    """One row per process."""
    table = Table(box=None, pad_edge=False)
    for title in ("role", "address", "pid", "state"):
        table.add_column(title, no_wrap=title != "state")
    table.add_column("model", overflow="fold")
    for title in ("vocabulary", "cache used", "prefix hits", "preemptions"):
        table.add_column(title, justify="right", no_wrap=True)
    mine = answer.coordinator
    state = {True: "ready", False: "not serving", None: "unknown"}[mine.serving]
    rows = [["coordinator", mine.address, str(mine.process_id), state], *map(_worker_row, answer.workers)]
    for row in rows:
        # Not as markup, because addresses and reasons may contain brackets.
        table.add_row(*map(Text, row))
    return table


def _summary(answer: ServerStatus, scheme: str) -> str:
    mine = answer.coordinator
    mode = mine.acceptance_mode.value if mine.acceptance_mode else "unknown"
    http = f"\nHTTP at {scheme}://{mine.http_address}/v1" if mine.http_address else ""
    others = f"\ncoordinators {', '.join(mine.coordinators)}" if mine.coordinators else ""
    warnings = "".join(f"\nwarning: {warning}" for warning in mine.warnings)
    return (
        f"K = {mine.num_speculative_tokens}{_trees(mine)}, acceptance {mode}, "
        f"sources {', '.join(('draft', *mine.sources))}; "
        f"{mine.running} running, {mine.waiting} waiting, "
        f"{mine.finished_requests} finished, {mine.failed_requests} failed completions (each of n), "
        f"{mine.num_preemptions} preempted{http}{others}{warnings}"
    )


def _trees(coordinator: CoordinatorStatus) -> str:
    """The defaults of trees and drafts; empty for chains of one draft."""
    width, drafts = coordinator.tree_width, coordinator.drafts_per_sequence
    told = [f"tree width {width}"] if width != 1 else []
    told += [f"{drafts} drafts"] if drafts != 1 else []
    return f", {', '.join(told)}, up to {coordinator.max_tree_nodes} nodes" if told else ""


def _hit_rate(cache: CacheInfo) -> str:
    """Share of the looked-up tokens found in the cache, and the number of lookups."""
    queries = cache.prefix_cache_queries
    return f"{cache.prefix_cache_hits / queries:.0%} of {queries:,}" if queries else "none yet"


def _model(info: WorkerInfo) -> str:
    """The worker's model, or its drafter without one."""
    if info.drafter:
        return f"{info.drafter}, with the tokenizer of {info.model}"
    return f"{info.model}, {info.num_parameters / 1e6:,.1f}M, {info.dtype}, {info.device}"


def _worker_row(worker: WorkerStatus) -> list[str]:
    state = worker.state.value + (f" ({worker.reason})" if worker.reason else "")
    info = worker.info
    if info is None:
        return [worker.role, worker.address, "", state]
    cache = info.cache
    used = (cache.total_blocks - cache.free_blocks) * cache.block_size
    return [
        worker.role,
        worker.address,
        str(info.process_id),
        state,
        _model(info),
        f"{info.vocabulary_size:,}",
        f"{used:,} of {cache.total_blocks * cache.block_size:,}",
        _hit_rate(cache),
        f"{cache.num_preemptions:,}",
    ]
