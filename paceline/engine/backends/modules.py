"""The logits of a model through its own transformers modules: the backend that serves every model."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor

from paceline.core.errors import InvalidArgumentError
from paceline.engine.backends.attention import IMPLEMENTATION, running
from paceline.engine.backends.interface import ServedModel
from paceline.engine.backends.ragged_batch import RaggedBatch
from paceline.engine.backends.torch_backend import TorchBackend, bytes_read


class ModulesForward:
    """Calls the model on a batch."""

    def __init__(self, model: Any) -> None:
        """Raises InvalidArgumentError naming `model` for an unsupported model."""
        if model.config._attn_implementation != IMPLEMENTATION:
            raise InvalidArgumentError("model", f"must use the attention implementation {IMPLEMENTATION!r}")
        if model.training:
            raise InvalidArgumentError("model", "must be in evaluation mode")
        accepted = inspect.signature(model.forward).parameters
        if "position_ids" not in accepted:
            raise InvalidArgumentError("model", f"{type(model).__name__} does not take position_ids")
        config = model.config.get_text_config(decoder=True)
        self._model = model
        self._keeps_logits = "logits_to_keep" in accepted
        self._keeps_by_index = bool(getattr(config, "num_kv_shared_layers", 0))
        # A mask with four dimensions is passed through unchanged. Otherwise transformers would build its own,
        # which Paceline's attention ignores.
        self._no_mask = torch.zeros(1, 1, 1, 1, dtype=model.dtype, device=model.device)

    def __call__(self, batch: RaggedBatch) -> Tensor:
        """Logits of the rows that the batch keeps, [rows, vocabulary]; call in inference mode."""
        keep = batch.logits_to_keep
        if self._keeps_by_index and isinstance(keep, int) and keep:
            # With a count, such a model drops the other rows before the layers that share keys and values.
            rows = batch.input_ids.shape[1]
            keep = torch.arange(rows - keep, rows, device=batch.input_ids.device)
        limit = {"logits_to_keep": keep} if self._keeps_logits else {}
        with running(batch):
            logits: Tensor = self._model(
                input_ids=batch.input_ids,
                attention_mask=self._no_mask,
                position_ids=batch.position_ids,
                use_cache=False,
                paceline_batch=batch,
                **limit,
            ).logits[0]
        if not self._keeps_logits:
            logits = logits[-keep:] if isinstance(keep, int) else logits.index_select(0, keep)
        return logits

    def pack(self) -> bool:
        """Nothing to pack: the modules keep their weights."""
        return False


def modules_backend(served: ServedModel) -> TorchBackend:
    """The backend of any decoder that transformers runs on Paceline's attention."""
    return TorchBackend(ModulesForward(served.model), bytes_read(served.model), served.attention)
