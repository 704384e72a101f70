"""Judging a batch of rounds in every acceptance mode: outcomes of a CPU, time, waits, memory."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch

from paceline.core.types import (
    AcceptanceMode,
    Outcome,
    Proposal,
    SamplingParams,
    SequenceParams,
    SparseDistribution,
)
from target_worker.acceptance.items import VerifyItem
from target_worker.verify import verify_items
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import K

WARM: Final = {"temperature": 0.8}
_KINDS: Final[Mapping[str, Mapping[str, Any]]] = {
    "": WARM,
    "greedy": {"temperature": 0.0},
    "top-p": WARM | {"top_p": 0.9},
    "penalties": WARM | {"repetition_penalty": 1.2, "frequency_penalty": 0.3},
}
_COMPARED = 16
"""Rounds whose outcomes a CPU gives as well, which takes it longer than the device takes for all."""
_LEDGER = 200
"""Tokens before each judged round, which penalties count."""


def _cases(bench: Bench) -> Iterator[Case]:
    for count in bench.sizes.judged:
        for mode, kind in itertools.product(AcceptanceMode, _KINDS):
            if kind in ("", "top-p") or mode is AcceptanceMode.COUPLED:
                name = f"{count} x {K + 1} rows, {mode.value}{', ' * bool(kind)}{kind}"
                yield (
                    name,
                    lambda count=count, mode=mode, kind=kind: _measured(bench, count, mode, _KINDS[kind]),
                )


def items_of(count: int, mode: AcceptanceMode, sampling: Mapping[str, Any]) -> list[VerifyItem]:
    """Rounds whose draft tokens are drawn from the same few, equally likely."""
    ids, shares = np.arange(8, dtype="<u4").tobytes(), np.full(8, 1 / 8, dtype="<f4").tobytes()
    sent = (SparseDistribution(ids, shares),) * K if mode.facts.needs_q else ()
    ledger = [3 + i % 90 for i in range(_LEDGER)]
    return [
        VerifyItem(
            SequenceParams(
                SamplingParams(seed=11 + i, max_tokens=4 * _LEDGER, **sampling),
                mode,
                prompt_length=_LEDGER // 2,
            ),
            ledger,
            Proposal(tuple((i + j) % 8 for j in range(K)), (), sent),
        )
        for i in range(count)
    ]


def logits_of(count: int, vocabulary: int) -> torch.Tensor:
    """float32 [count * (K + 1), vocabulary] in which the draft's tokens are likely, as drafts are."""
    logits = torch.randn(count * (K + 1), vocabulary, generator=torch.Generator().manual_seed(3))
    logits[:, :8] += 10
    return logits


def _measured(bench: Bench, count: int, mode: AcceptanceMode, sampling: Mapping[str, Any]) -> Figures:
    device, items = bench.device, items_of(count, mode, sampling)
    on_host = logits_of(count, bench.sizes.target.vocabulary)
    logits = on_host.to(device.torch)

    def judge() -> Sequence[Outcome | None]:
        return verify_items(items, logits, logits)

    judge()
    with device.peak_bytes() as peak:
        found = judge()
        bytes_taken = peak()
    few = on_host[: min(_COMPARED, count) * (K + 1)]
    wanted = verify_items(items[:_COMPARED], few, few)
    accepted = [outcome.num_accepted for outcome in wanted if outcome is not None]
    figures = {
        "ms": 1e3 * device.seconds(judge, 10),
        "waits": device.waits(judge),
        "peak_MiB": None if bytes_taken is None else bytes_taken / 2**20,
        "logits_MiB": logits.numel() * 4 / 2**20,
        "compared_rounds": len(wanted),
        "accepted_tokens": sum(accepted),
        "different_outcomes": sum(a != b for a, b in zip(found, wanted, strict=False)),
    }
    # Sums of a whole row differ in their last bits, which may move a draw by ratios.
    if figures["different_outcomes"] > 0.1 * len(wanted):
        raise Failed("a device judges otherwise than a CPU", figures)
    return figures


CHECK = Check("judging", "judging in every acceptance mode", _cases, minutes=1.5)
