"""`paceline demo`: streams one completion, coloured by token origin, and compares it with plain decoding.

All figures are measured on the stack that streamed the text. Requests with and without speculation alternate
after a warm-up of both, so that a slow phase of the machine affects both alike.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from paceline.assets.tokenizer import load_tokenizer
from paceline.client import AsyncClient, GenerationResult
from paceline.core.errors import InvalidArgumentError
from paceline.core.types import AcceptanceMode, SamplingParams, SpeculationParams, TokenOrigin
from paceline.decoding import theory
from paceline.supervisor import StackConfig, log_to_stderr, serve_stack, steps_to

DEFAULT_PROMPT: Final = '''"""Small helpers for reading configuration files."""

import json
import os


def read_config(path):
    """Return the configuration at *path* as a dictionary."""
    with open(path, encoding="utf-8") as file:
'''

STYLES: Final = {
    TokenOrigin.ACCEPTED: "green",
    TokenOrigin.CORRECTION: "red",
    TokenOrigin.BONUS: "cyan",
    TokenOrigin.TARGET: "",
}
_MEANINGS: Final = {
    TokenOrigin.ACCEPTED: "drafted, and accepted by the target",
    TokenOrigin.CORRECTION: "the target's own token where it rejected the draft",
    TokenOrigin.BONUS: "the target's extra token after a fully accepted draft",
}
_PLAIN: Final = SpeculationParams(num_speculative_tokens=0)
_SPECULATIVE: Final = SpeculationParams()
_SHAPES: Final = {
    "chains": SpeculationParams(drafter="draft", tree_width=1),
    "trees of 16 tokens": SpeculationParams(drafter="draft", tree_width=4, max_tree_nodes=16),
}
"""By the draft alone: what is copied from the text is a chain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoConfig:
    """Settings of the demo."""

    stack: StackConfig = field(
        default_factory=lambda: StackConfig(target_device="cpu", draft_device="cpu", num_speculative_tokens=4)
    )
    """A fixed K, because automatic K might choose not to draft. On the CPU, which every machine has."""
    prompt: str = DEFAULT_PROMPT
    max_tokens: int = 160
    temperature: float = 0.7
    """Not 0, at which a model of this size soon repeats itself."""
    seed: int = 0
    pairs: int = 3
    """Number of measured requests with speculation, and as many without."""
    verbose: bool = False
    """Show the processes' logs."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError naming the field."""
        if self.pairs < 1:
            raise InvalidArgumentError("pairs", f"must be at least 1, got {self.pairs}")
        _ = self.sampling  # validates the rest

    @property
    def sampling(self) -> SamplingParams:
        """Parameters of every request, so that both ways do the same work."""
        return SamplingParams(
            temperature=self.temperature, seed=self.seed, max_tokens=self.max_tokens, ignore_eos=True
        )


@dataclass(frozen=True, slots=True)
class Measured:
    """One request and its duration at the client."""

    result: GenerationResult
    seconds: float

    @property
    def rate(self) -> float:
        """Tokens per second, prefill included."""
        return self.result.usage.completion_tokens / self.seconds


def run_demo(config: DemoConfig, console: Console) -> None:
    """Start the stack, stream, measure, print, stop the stack. Raises PacelineError."""
    console.print(
        f"Starting a coordinator, a target worker ({config.stack.target_model}) and "
        f"a draft worker ({config.stack.draft_model}) …"
    )
    with contextlib.ExitStack() as exits:
        with console.status("loading libraries …") as status:
            told = status.update if console.is_terminal else console.print
            sink = log_to_stderr if config.verbose else steps_to(told)
            stack = exits.enter_context(serve_stack(config.stack, sink=sink))
        for role in stack.roles:
            console.print(f"  {role:11} pid {stack.pid(role):<7} {stack.address_of(role)}")
        # asyncio turns Ctrl-C into a cancellation. A KeyboardInterrupt inside gRPC could make it hang.
        speculative, plain, shapes = asyncio.run(_show(stack.address, config, console))
    console.print()
    console.print(comparison(speculative, plain))
    console.print()
    console.print(round_account(speculative[-1].result, plain[-1].result))
    console.print()
    for line in (*conclusions(speculative, plain, config.temperature), *of_shapes(shapes)):
        console.print(line)


async def _show(
    address: str, config: DemoConfig, console: Console
) -> tuple[list[Measured], list[Measured], Mapping[str, GenerationResult]]:
    async with AsyncClient(address) as client:
        await _warm_up(client, config)
        await stream_completion(client, config, console)
        return *await _measure(client, config), await _shapes(client, config)


async def _warm_up(client: AsyncClient, config: DemoConfig) -> None:
    """Run unmeasured requests, because first passes allocate memory and load code."""
    for speculation in (_SPECULATIVE, _PLAIN):
        await client.generate(config.prompt, config.sampling, speculation=speculation)


async def stream_completion(client: AsyncClient, config: DemoConfig, console: Console) -> None:
    """Print the completion as it arrives, each token in the colour of its origin."""
    if console.is_terminal and not console.no_color:
        legend = [f"[{STYLES[o]}]{o.value}[/]: {meaning}" for o, meaning in _MEANINGS.items()]
        console.print("\n" + "\n".join(legend))
    console.print()
    console.print(Text(config.prompt, style="dim"), end="", soft_wrap=True)
    pieces = TokenTexts(config.stack.target_model)
    async with client.stream(config.prompt, config.sampling, speculation=_SPECULATIVE) as stream:
        async for chunk in stream:
            for token_id, origin in zip(chunk.token_ids, chunk.origins, strict=True):
                console.print(Text(pieces.text_of(token_id), style=STYLES[origin]), end="", soft_wrap=True)
    console.print()


class TokenTexts:
    """The text that each token adds. A character of several tokens belongs to the last of them."""

    def __init__(self, model: str) -> None:
        from tokenizers.decoders import DecodeStream

        self._begin: Callable[[], Any] = partial(DecodeStream, skip_special_tokens=True)
        self._tokenizer = load_tokenizer(model, "target_model")
        self._stream = self._begin()
        self._held: list[int] = []
        """Tokens of an incomplete character."""

    def text_of(self, token_id: int) -> str:
        """The text of the next token; empty while a character is incomplete."""
        self._held.append(token_id)
        try:
            text = self._stream.step(self._tokenizer, token_id)
        except Exception:  # raised by tokenizers for bytes that cannot become a character
            self._stream = self._begin()
            text = self._tokenizer.decode(self._held)
        if text:
            self._held.clear()
        return text or ""


async def _measure(client: AsyncClient, config: DemoConfig) -> tuple[list[Measured], list[Measured]]:
    """Measure speculative and plain requests in turns."""
    speculative: list[Measured] = []
    plain: list[Measured] = []
    for _ in range(config.pairs):
        for speculation, measured in ((_SPECULATIVE, speculative), (_PLAIN, plain)):
            start = time.perf_counter()
            result = await client.generate(config.prompt, config.sampling, speculation=speculation)
            measured.append(Measured(result, time.perf_counter() - start))
    return speculative, plain


async def _shapes(client: AsyncClient, config: DemoConfig) -> Mapping[str, GenerationResult]:
    """One request with chains and one with trees; none where the server cannot draft trees."""
    chains_only = config.stack.acceptance.facts.whole_chain and config.temperature > 0
    if chains_only or config.stack.num_speculative_tokens == 0:
        return {}
    return {
        name: await client.generate(config.prompt, config.sampling, speculation=speculation)
        for name, speculation in _SHAPES.items()
    }


def of_shapes(results: Mapping[str, GenerationResult]) -> list[str]:
    """Tokens of a round for each shape of the draft's proposals."""
    told = [
        f"{result.speculative_decoding.mean_acceptance_length:.2f} with {name}"
        for name, result in results.items()
    ]
    return [f"Tokens of a round, by the draft alone: {', '.join(told)}."] if told else []


def comparison(speculative: list[Measured], plain: list[Measured]) -> Table:
    """A table with and without speculation; rates are medians."""
    counts = speculative[-1].result.speculative_decoding
    table = Table(title="With and without speculation", box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    table.add_column("speculative", justify="right")
    table.add_column("plain", justify="right")
    rates = [statistics.median(m.rate for m in measured) for measured in (speculative, plain)]
    table.add_row("tokens per second", f"{rates[0]:.1f}", f"{rates[1]:.1f}")
    table.add_row("times plain decoding", f"{rates[0] / rates[1]:.2f}×", "1.00×")
    table.add_row(
        "target passes",
        str(counts.num_rounds),
        str(plain[-1].result.speculative_decoding.num_rounds),
    )
    table.add_row(
        "proposals copied from the text", f"{counts.num_prompt_lookups} of {counts.num_spec_steps}", ""
    )
    table.add_row("acceptance rate", f"{counts.draft_acceptance_rate:.1%}", "")
    table.add_row("mean acceptance length", f"{counts.mean_acceptance_length:.2f}", "")
    for position, rate in enumerate(counts.acceptance_rate_per_position, 1):
        table.add_row(f"  accepted at position {position}", f"{rate:.1%}", "")
    return table


def _parts(result: GenerationResult) -> Iterator[tuple[str, float]]:
    """The parts of a request's time, in seconds; they add up to the total."""
    timings = result.timings
    yield "draft", timings.draft
    yield "target", timings.target
    yield "queue", timings.queue
    yield "wire", timings.wire
    yield "coordinator", timings.coordinator


def round_account(speculative: GenerationResult, plain: GenerationResult) -> Table:
    """A table of milliseconds and shares of an average round."""
    table = Table(title="Where the time of a round goes", box=None, pad_edge=False, title_justify="left")
    table.add_column("")
    for name in ("speculative", "share", "plain", "share"):
        table.add_column(name, justify="right")
    rows = zip(_parts(speculative), _parts(plain), strict=True)
    for (part, mine), (_, others) in rows:
        cells = [part]
        for seconds, result in ((mine, speculative), (others, plain)):
            rounds = max(1, result.speculative_decoding.num_rounds)
            total = result.timings.total or 1.0
            cells += [f"{1000 * seconds / rounds:.2f} ms", f"{seconds / total:.0%}"]
        table.add_row(*cells)
    return table


def conclusions(speculative: list[Measured], plain: list[Measured], temperature: float) -> list[str]:
    """Whether the tokens are equal, and the theory's speed-up for the measured values."""
    with_draft, without = speculative[-1].result, plain[-1].result
    pairs = zip(with_draft.token_ids, without.token_ids, strict=False)
    different = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
    if different is None and len(with_draft.token_ids) == len(without.token_ids):
        same = f"Both ways gave the same {len(without.token_ids)} tokens."
    else:
        same = f"The two ways differ from token {different} on: {_why(with_draft.acceptance, temperature)}."
    counts = with_draft.speculative_decoding
    rejected = with_draft.origins.count(TokenOrigin.CORRECTION)
    alpha = theory.measured_alpha(counts.num_accepted_draft_tokens, rejected)
    if alpha is None:
        return [same, "Nothing was drafted."]
    k = round(counts.num_draft_tokens / counts.num_spec_steps)
    step = without.timings.target / max(1, without.speculative_decoding.num_rounds)
    c = with_draft.timings.draft / counts.num_draft_tokens / step if step else 0.0
    return [
        same,
        f"Theorem 3.8 predicts {theory.speedup(alpha, c, k):.2f}× for the measured α = {alpha:.2f}, "
        f"c = {c:.2f} (drafting not hidden by lookahead) and K = {k}. It ignores the wire and the cost of "
        "the target's extra rows.",
    ]


def _why(mode: AcceptanceMode, temperature: float) -> str:
    """Why the tokens of one seed may differ."""
    if mode.facts.shares_noise or temperature == 0:
        return "different matrix shapes round the last bits of logits differently"
    return f"in {mode.value} mode the tokens of a seed depend on the rounds (their distribution does not)"
