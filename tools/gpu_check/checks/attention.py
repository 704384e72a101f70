"""Passes on the paged cache against transformers in float32: shapes of heads, lengths and chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from paceline.engine.layout import SequenceInput
from paceline.engine.runner import ModelRunner
from tools.gpu_check.models import Runners, new_model, reference_of, runners_of
from tools.gpu_check.report import Failed, Figures
from tools.gpu_check.running import Bench, Case, Check
from tools.gpu_check.sizes import Shape

_MOST = {torch.bfloat16: 0.1, torch.float32: 1e-3}
"""Relative error of a row of logits that two layers may have."""
_ROWS = (65, 17, 5, 1)
"""Rows of a pass: a chunk of a prompt, verifications, a step."""


def _cases(bench: Bench) -> Iterator[Case]:
    for head_dim in (64, 128):
        for per_kv in (1, 4):
            shape = Shape("attention", 2, 8 * head_dim, 512, 8, 8 // per_kv, 1024, 2048)
            yield f"heads of {head_dim}, {per_kv} a key", lambda shape=shape: _measured(bench, shape)


def _measured(bench: Bench, shape: Shape) -> Figures:
    device, sizes = bench.device, bench.sizes
    model = new_model(device, shape, sizes.dtype)
    reference = reference_of(device, shape, model)
    runners = runners_of(device, model, 2 * max(sizes.attention_lengths) + 64)
    recorded = runners.recording(device.new_recorder()).runner
    tokens = [3 + 7 * i % (shape.vocabulary - 3) for i in range(max(sizes.attention_lengths))]
    ids = torch.tensor([tokens], device=device.torch)
    with torch.inference_mode():
        wanted = reference(input_ids=ids, use_cache=False).logits[0].float()
    largest, where = 0.0, ""
    for length in sizes.attention_lengths:
        for rows in sorted({length, *(rows for rows in _ROWS if rows < length)}):
            for name, found in _fed(runners, recorded, tokens[:length], rows).items():
                right = wanted[length - rows : length]
                error = float(((found - right).norm(dim=-1) / right.norm(dim=-1)).max())
                if not error <= largest:  # NaN is not
                    largest, where = error, f"{name}, {rows} rows at {length} entries"
    figures = {"largest_relative_error": largest, "at": where}
    if not largest < _MOST[sizes.dtype]:
        raise Failed("a row's logits are not those of transformers", figures)
    return figures


def _fed(
    runners: Runners, recorded: ModelRunner, tokens: Sequence[int], rows: int
) -> dict[str, torch.Tensor]:
    """Logits of the last rows behind all others, by each runner; recorded where a recording fits."""
    found = {}
    for name, runner in (("launched", runners.launched), ("recorded", recorded)):
        table = runner.new_table()
        if len(tokens) > rows:
            runners.launched.forward([SequenceInput(table, tokens[:-rows], 0)])
        for _ in range(3 if name == "recorded" else 1):  # launched, recorded, replayed
            table.truncate_to(len(tokens) - rows)
            found[name] = runner.forward([SequenceInput(table, tokens[-rows:], rows)])
        table.free()
    return found


CHECK = Check("attention", "logits on the paged cache against transformers in float32", _cases)
