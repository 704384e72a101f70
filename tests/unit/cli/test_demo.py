"""The demonstration: colours by origin, whole characters, and times that add up."""

from __future__ import annotations

import contextlib
import io
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from harness.commands import command
from harness.pair import byte_tokenizer
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from paceline.cli.commands import plan
from paceline.client import GenerationChunk, GenerationResult, RoundTimings, SpeculativeDecoding, Usage
from paceline.core.types import AcceptanceMode, TokenOrigin
from paceline.demo import (
    STYLES,
    DemoConfig,
    Measured,
    TokenTexts,
    comparison,
    conclusions,
    of_shapes,
    round_account,
    stream_completion,
)
from paceline.supervisor import StackConfig

_ANSI = {"green": "\x1b[32m", "red": "\x1b[31m", "cyan": "\x1b[36m"}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A folder with a tokenizer whose tokens are bytes."""
    byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def result(
    token_ids: tuple[int, ...] = (1, 2, 3, 4, 5, 6), *, rounds: int = 2, drafted: int = 8, accepted: int = 4
) -> GenerationResult:
    return GenerationResult(
        request_id="r",
        seed=0,
        acceptance=AcceptanceMode.COUPLED,
        text="",
        token_ids=token_ids,
        origins=(TokenOrigin.ACCEPTED,) * len(token_ids),
        finish_reason="length",
        stop_reason=None,
        usage=Usage(3, len(token_ids), 3 + len(token_ids)),
        speculative_decoding=SpeculativeDecoding(
            mean_acceptance_length=1 + accepted / rounds,
            draft_acceptance_rate=accepted / drafted if drafted else 0.0,
            acceptance_histogram=(0, 1, 0, 1),
            num_spec_steps=rounds if drafted else 0,
            num_draft_tokens=drafted,
            num_accepted_draft_tokens=accepted,
            acceptance_rate_per_position=(1.0, 0.5) if drafted else (),
            num_rounds=rounds,
            num_lookahead_hits=0,
            num_prompt_lookups=min(rounds, 1),
        ),
        timings=RoundTimings(draft=0.02, target=0.04, queue=0.01, wire=0.02, coordinator=0.01, total=0.1),
        outputs=(),
    )


def render(shown: Any) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(shown)
    return console.file.getvalue()


def test_a_character_of_several_tokens_is_shown_whole(model: Path) -> None:
    text = 'naïve = "日本 🚲"\n'
    texts = TokenTexts(str(model))
    pieces = [texts.text_of(token_id) for token_id in byte_tokenizer().encode(text).ids]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert pieces.count("") == len(text.encode()) - len(text)


def test_invalid_bytes_do_not_end_the_demo(tmp_path: Path) -> None:
    vocabulary = {token: i for i, token in enumerate(["a", *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    texts = TokenTexts(str(tmp_path))
    given = [*(f"<0x{byte:02X}>" for byte in "日".encode()), "<0xE6>", "a", "a"]
    assert "".join(texts.text_of(vocabulary[token]) for token in given) == "日\ufffdaa"


class FakeClient:
    """Every stream of it has these chunks."""

    def __init__(self, chunks: list[GenerationChunk]) -> None:
        self.chunks = chunks

    @contextlib.asynccontextmanager
    async def stream(self, *_: object, **__: object) -> AsyncIterator[AsyncIterator[GenerationChunk]]:
        async def chunks() -> AsyncIterator[GenerationChunk]:
            for chunk in self.chunks:
                yield chunk

        yield chunks()


async def completion(model: Path, console: Console) -> str:
    """Stream 'abcd', one origin each, in two rounds."""
    a, b, c, d = byte_tokenizer().encode("abcd").ids
    chunks = [
        GenerationChunk(0, (a, b), "ab", (TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION)),
        GenerationChunk(2, (c, d), "c", (TokenOrigin.BONUS, TokenOrigin.TARGET)),
        GenerationChunk(4, (), "d", (), "length"),
    ]
    config = DemoConfig(stack=StackConfig(target_model=str(model)), prompt="x = ")
    await stream_completion(FakeClient(chunks), config, console)  # type: ignore[arg-type]
    return console.file.getvalue()


async def test_each_token_has_the_colour_of_its_origin(model: Path) -> None:
    file = io.StringIO()
    shown = await completion(
        model, Console(file=file, force_terminal=True, color_system="standard", width=100, _environ={})
    )
    for letter, origin in zip("abc", list(STYLES)[:3], strict=True):
        assert f"{_ANSI[STYLES[origin]]}{letter}\x1b[0m" in shown
        assert f"{_ANSI[STYLES[origin]]}{origin.value}\x1b[0m" in shown  # the legend
    assert shown.rstrip().endswith("d")


async def test_without_a_terminal_there_is_no_colour(model: Path) -> None:
    assert await completion(model, Console(file=io.StringIO())) == "\nx = abcd\n"


def test_rates_are_medians_and_counts_the_last_requests() -> None:
    speculative = [Measured(result(), seconds) for seconds in (0.5, 0.01, 0.1)]
    plain = [Measured(result(drafted=0, accepted=0, rounds=6), seconds) for seconds in (0.2, 0.2, 9.0)]
    lines = [line.split() for line in render(comparison(speculative, plain)).splitlines()]
    for row in (
        "tokens per second 60.0 30.0",
        "times plain decoding 2.00× 1.00×",
        "target passes 2 6",
        "proposals copied from the text 1 of 2",
        "acceptance rate 50.0%",
        "mean acceptance length 3.00",
        "accepted at position 1 100.0%",
        "accepted at position 2 50.0%",
    ):
        assert row.split() in lines


def test_the_parts_of_a_round_add_up() -> None:
    """The total is the sum of its parts."""
    shown = render(round_account(result(), result()))
    rows = [line.split() for line in shown.splitlines() if "%" in line]
    assert [row[0] for row in rows] == ["draft", "target", "queue", "wire", "coordinator"]
    shares = [row[-1].removesuffix("%") for row in rows]
    assert sum(map(int, shares)) == 100
    assert "10.00 ms" in shown  # 0.02 s of draft time in 2 rounds


def test_equal_and_different_tokens_are_reported() -> None:
    same = conclusions([Measured(result(), 1.0)], [Measured(result(), 1.0)], 0.7)
    assert same[0] == "Both ways gave the same 6 tokens."
    other = conclusions([Measured(result(), 1.0)], [Measured(result((1, 2, 9, 4, 5, 6)), 1.0)], 0.7)
    assert other[0].startswith("The two ways differ from token 2 on")


@pytest.mark.parametrize("mode", AcceptanceMode)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_the_reason_for_different_tokens_fits_the_mode(mode: AcceptanceMode, temperature: float) -> None:
    """Numerics where a seed fixes the tokens, the rounds where they have a part in them."""
    one, other = ([Measured(replace(result(ids), acceptance=mode), 1.0)] for ids in ((1, 2), (1, 3)))
    told = conclusions(one, other, temperature)[0]
    by_design = mode is not AcceptanceMode.COUPLED and temperature > 0
    assert ("last bits of logits" in told) is not by_design
    assert (f"in {mode.value} mode the tokens of a seed depend on the rounds" in told) is by_design


def test_tokens_of_a_round_are_told_by_shape() -> None:
    shapes = {"chains": result(accepted=3), "trees of 16 tokens": result(drafted=32, accepted=5)}
    (line,) = of_shapes(shapes)
    assert line.endswith(": 2.50 with chains, 3.50 with trees of 16 tokens.")
    assert of_shapes({}) == []


def test_without_drafts_there_is_no_theory() -> None:
    told = conclusions([Measured(result(drafted=0, accepted=0), 1.0)], [Measured(result(), 1.0)], 0.7)
    assert told[1:] == ["Nothing was drafted."]


def test_alpha_counts_judged_draft_tokens_only() -> None:
    """Of each four two are accepted and one is rejected; the one behind it is not judged."""
    origins = (TokenOrigin.ACCEPTED, TokenOrigin.ACCEPTED, TokenOrigin.CORRECTION) * 2
    told = conclusions([Measured(replace(result(), origins=origins), 1.0)], [Measured(result(), 1.0)], 0.7)
    assert "α = 0.67" in told[1]


@pytest.mark.parametrize(("options", "device"), [([], "cpu"), (["--device", "cuda"], "cuda")])
def test_the_demo_runs_on_the_cpu_by_default(
    options: list[str], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a small GPU both workers would compete for the free memory."""
    asked: list[DemoConfig] = []
    monkeypatch.setattr(plan, "run_demo", lambda config, console: asked.append(config))
    monkeypatch.setattr(plan, "check_gpu", lambda *_: None)  # there may be none here
    assert command("demo", *options).returncode == 0
    both = {"target_device": device, "draft_device": device}
    assert asked == [DemoConfig(stack=replace(DemoConfig().stack, **both))]
    assert (DemoConfig().stack.target_device, DemoConfig().stack.draft_device) == ("cpu", "cpu")
