"""Bytes that a step moves, by shapes on `meta`, over the least: `python -m tests.cuda.traffic [--json]`.

A step is a recorded pass of a Llama-3-like model in bfloat16 and judging its rows. The least is: weights,
keys and values of all sequences, and logits, once each. Each operation counts what it reads and writes, as if
nothing stayed in the device's caches. Two kernels count as documented: attention in place reads its queries,
keys and values once and writes its results; the choice of tokens reads the scores once. What the kernel
writes and reads again when it splits the keys of a sequence is left out (below 1 %).
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import functools
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from transformers import LlamaConfig, LlamaForCausalLM

from paceline.core.types import AcceptanceMode, Proposal, SamplingParams, SequenceParams
from paceline.engine.backends.cache_attention.gathered import GATHERED
from paceline.engine.backends.cache_attention.interface import CacheAttention
from paceline.engine.backends.cache_attention.varlen import BLOCK, VarlenAttention
from paceline.engine.backends.captured import PATIENCE, CapturedBackend
from paceline.engine.backends.fused_eager import fused_eager_backend
from paceline.engine.backends.interface import ServedModel
from paceline.engine.cache import DEFAULT_BLOCK_SIZE, LayerLayout, PagedCache
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.model import prepare
from paceline.engine.runner import ModelRunner
from paceline.engine.scheduling.passes import row_checks
from target_worker.acceptance.items import VerifyItem
from target_worker.verify import judge_all
from tests.cuda.device import bytes_moved, bytes_of, writes_first

VOCAB: Final = 128_256
MAX_LEN: Final = 131_072
SHAPES: Final = {
    "8B": {"hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32},
    "1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "tie_word_embeddings": True,
    },
}
"""Of Llama 3.1 8B and Llama 3.2 1B."""
HEADS: Final = 32
KV_HEADS: Final = 8
SEQUENCES: Final = (1, 16, 64)
KEYS: Final = (1000, 4000, 8000)
ROWS: Final = {"8B": (1, 5), "1B": (1,)}
"""Of each sequence: plain decoding or a draft's step, and verification of K = 4."""
TREE: Final = (*(-1,) * 4, *(node // 2 for node in range(28)))
"""The parents of 32 nodes, 27 of them beside the trunk."""
TREES: Final = [(1, 4000), (16, 4000)]
"""Sequences and keys of steps of the 8B model that verify one for each sequence."""
ATTENTIONS: Final[dict[str, CacheAttention]] = {"gathered": GATHERED, "varlen": VarlenAttention(BLOCK)}


@dataclass(frozen=True)
class Step:
    """Bytes of one step."""

    model: str
    attention: str
    sequences: int
    keys: int
    """Entries of each sequence before the step."""
    rows: int
    moved: int
    least: int

    @property
    def ratio(self) -> float:
        """What it moves over the least."""
        return self.moved / self.least


class Meter(TorchDispatchMode):
    """Counts the bytes of operations while it is entered."""

    def __init__(self, entry_bytes: int) -> None:
        """`entry_bytes`: keys and values that attention in place reads in one layer."""
        super().__init__()
        self.moved: collections.Counter[str] = collections.Counter()
        self._entry_bytes = entry_bytes

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        name = op.overloadpacket
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        results = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        known = {t.untyped_storage()._cdata for t in read}
        views = all(t.untyped_storage()._cdata in known for t in results)
        if (views and not writes_first(op) and "out" not in (kwargs or {})) or "empty" in str(name):
            return out
        if name is torch.ops.torch_attn._varlen_attn:
            moved = bytes_of(args[0]) + self._entry_bytes + sum(map(bytes_of, results))
        else:
            moved = bytes_moved(name, read, results)
        self.moved[str(name)] += moved
        return out


class _ChoiceKernel:
    """In place of the kernels for coupled noise: reads the scores once."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter

    def choose(self, logits: Tensor, divisors: Tensor | None, *streams: Tensor) -> tuple[Tensor, Tensor]:
        tokens = torch.empty(len(logits), dtype=torch.int64, device="meta")
        values = torch.empty(len(logits), dtype=torch.float64, device="meta")
        self._meter.moved["choose"] += sum(map(bytes_of, (logits, *streams, tokens, values)))
        return tokens, values


class Model:
    """A model of a shape on an attention, without numbers."""

    def __init__(self, name: str, attention: str) -> None:
        config = LlamaConfig(
            **SHAPES[name],
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            vocab_size=VOCAB,
            max_position_embeddings=MAX_LEN,
        )
        with torch.device("meta"):
            model = prepare(LlamaForCausalLM._from_config(config, dtype=torch.bfloat16))
        self._name, self._attention = name, attention
        kind = ATTENTIONS[attention]
        dim = config.hidden_size // HEADS
        layers = [LayerLayout(KV_HEADS, dim, dim, None, HEADS // KV_HEADS)] * config.num_hidden_layers
        size = max(DEFAULT_BLOCK_SIZE, kind.smallest_block)
        cache = PagedCache(
            layers,
            num_blocks=max(SEQUENCES) * (max(KEYS) + size) // size,
            block_size=size,
            dtype=torch.bfloat16,
            device="meta",
        )
        backend = fused_eager_backend(ServedModel(model, layers, MAX_LEN, VOCAB, attention=kind))
        assert backend is not None
        self._entry_bytes = cache.bytes_per_block // size
        self._num_layers = len(layers)
        self._weight_bytes = backend.weight_bytes
        self.captured = CapturedBackend(
            backend,
            backend.recordable,
            cache,
            lambda step: step,
            max_model_len=MAX_LEN,
            vocab_size=VOCAB,
        )
        self.runner = ModelRunner(model, cache, self.captured)

    def step(self, sequences: int, keys: int, rows: int, parents: tuple[int, ...] = ()) -> Step:
        """One step of sequences whose blocks lie in turn, when its shape has been recorded.

        `parents`: of the last rows, if they are the nodes of a tree.
        """
        tables = [self.runner.new_table() for _ in range(sequences)]
        for start in range(0, keys, 1024):
            for table in tables:
                table.reserve(min(1024, keys - start))
                table.commit(min(1024, keys - start))
        inputs = [SequenceInput(table, [1] * rows, rows, parents) for table in tables]
        entries = sequences * (keys + rows) * self._entry_bytes
        meter = Meter(entries // self._num_layers)

        def forward() -> Tensor:
            logits = self.runner.forward(inputs)
            for table in tables:
                table.truncate_to(keys)
            return logits

        for _ in range(1 + PATIENCE):
            forward()
        with meter:
            _judge(forward(), rows, parents, meter)
        for table in tables:
            table.free()
        logits = sequences * rows * VOCAB * 2
        return Step(
            self._name,
            self._attention,
            sequences,
            keys,
            rows,
            meter.moved.total(),
            self._weight_bytes + entries + logits,
        )


def _judge(logits: Tensor, rows: int, parents: tuple[int, ...], meter: Meter) -> None:
    """As `verify_items` does on a device, but for the copy to the host."""
    params = SequenceParams(SamplingParams(temperature=0.8, seed=1), AcceptanceMode.COUPLED, prompt_length=3)
    item = VerifyItem(params, range(9), Proposal(tuple(range(rows - 1)), parents))
    kernels: Callable[[torch.device], Any] = lambda device: _ChoiceKernel(meter)  # noqa: E731
    with patch("paceline.decoding.coupled.gumbel_kernels", kernels):
        judge_all([item] * (len(logits) // rows), logits, ())
        row_checks(logits)


@functools.cache
def model_of(name: str, attention: str) -> Model:
    """A model of `SHAPES` on one of `ATTENTIONS`."""
    return Model(name, attention)


def cases() -> list[tuple[str, int, int, int]]:
    """Model, rows, sequences and keys of all steps."""
    return [(name, r, s, k) for name in SHAPES for r in ROWS[name] for s in SEQUENCES for k in KEYS]


def main() -> None:
    """Write a row for each step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON list")
    asked = parser.parse_args()
    found = []
    chains = [(*case, ()) for case in cases()]
    trees = [("8B", 1 + len(TREE), *shape, TREE) for shape in TREES]
    if not asked.json:
        print(f"{'GB a step':22}{'least':>8}" + "".join(f"{name:>16}" for name in ATTENTIONS))
    for model, rows, sequences, keys, parents in chains + trees:
        kinds = [model_of(model, attention).step(sequences, keys, rows, parents) for attention in ATTENTIONS]
        found += kinds
        if not asked.json:
            told = "".join(f"{step.moved / 1e9:9.1f} ({step.ratio:.2f})" for step in kinds)
            what = f"{model} {sequences} x {keys} x {rows}"
            print(f"{what:22}{kinds[0].least / 1e9:8.1f}{told}", flush=True)
    if asked.json:
        print(json.dumps([dataclasses.asdict(step) for step in found], indent=1))


if __name__ == "__main__":
    main()
