"""Models as drafters and as the target: Paceline's own passes, one token of one text at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from paceline.bench.machine import MeasuredModel, device_name
from paceline.core.clock import Clock
from paceline.core.config import TargetConfig
from paceline.core.errors import InvalidArgumentError
from paceline.engine.layout import SequenceInput
from paceline.engine.loading.build import Built, build
from paceline.measure.config import MeasureConfig
from paceline.measure.drafters import ScoredRow

_BLOCK_SIZE = 16
_PREFILL_ROWS = 512  # of a pass, so that a long prompt needs little memory; the workers' default


class SteppedModel:
    """A loaded model with the cache of one text."""

    def __init__(self, name: str, built: Built, clock: Clock) -> None:
        assert built.runner is not None
        self.name = name
        self.built = built
        self.operations = float(_multiplied(built))
        self.weight_bytes = float(built.weight_bytes)
        self._runner = built.runner
        self._table = built.runner.new_table()
        self._clock = clock

    @property
    def device(self) -> torch.device:
        """The device of its logits."""
        return self.built.device

    @property
    def facts(self) -> MeasuredModel:
        """For the record."""
        built = self.built
        return MeasuredModel(
            name=self.name,
            device=str(built.device),
            device_name=device_name(str(built.device)),
            dtype=str(built.dtype).removeprefix("torch."),
            num_parameters=built.num_parameters,
            weight_bytes=built.weight_bytes,
        )

    def begin(self) -> None:
        """Forget the text."""
        self._table.truncate_to(0)

    def score(self, text: Sequence[int]) -> ScoredRow:
        """The model's logits; see `MeasuredDrafter`."""
        unread = text[self._table.length :]
        while len(unread) > _PREFILL_ROWS:
            self._runner.forward([SequenceInput(self._table, unread[:_PREFILL_ROWS], 0)])
            unread = unread[_PREFILL_ROWS:]
        begun = self._now()
        logits = self._runner.forward([SequenceInput(self._table, unread, 1)])
        seconds = self._now() - begun
        return ScoredRow(logits[0], seconds if len(unread) == 1 else None)

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return self._clock()


def load(role: str, name: str, config: MeasureConfig, longest: int, clock: Clock) -> SteppedModel:
    """Load a model for texts of up to `longest` tokens.

    Raises InvalidArgumentError naming `target_model`, `draft_model` (the `role` with `_model`), or another
    setting.
    """
    with _renaming({"model": f"{role}_model", "max_model_len": "max_tokens", "num_blocks": "device"}):
        built = build(
            TargetConfig(
                model=name,
                device=config.device,
                dtype=config.dtype,
                threads=config.threads,
                max_model_len=longest,
                block_size=_BLOCK_SIZE,
                num_blocks=-(-longest // _BLOCK_SIZE),
            )
        )
    return SteppedModel(name, built, clock)


def check_pair(target: SteppedModel, draft: SteppedModel) -> None:
    """Raises InvalidArgumentError naming `draft_model` unless both have the same tokens."""
    ours, its = target.built.loaded, draft.built.loaded
    if ours.fingerprint != its.fingerprint:
        raise InvalidArgumentError(
            "draft_model",
            f"{draft.name} and {target.name} have different tokenizers, of {its.vocab_size} and "
            f"{ours.vocab_size} tokens",
        )


def _multiplied(built: Built) -> int:
    """Parameters that a token is multiplied with: all except an embedding that is not also the head."""
    config = built.loaded.model.config.get_text_config(decoder=True)
    return built.num_parameters - (
        0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    )


@contextlib.contextmanager
def _renaming(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the field of an InvalidArgumentError raised inside."""
    try:
        yield
    except InvalidArgumentError as error:
        told = error.description
        if error.field == "max_model_len":
            told = f"with the longest prompt, {told}"
        raise type(error)(names.get(error.field, error.field), told) from error
