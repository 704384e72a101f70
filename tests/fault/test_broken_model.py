"""A model with NaN logits for one token: that request fails, and no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from harness.history import Recording, validate
from harness.pair import Pair
from harness.stacks import OwnCoordinator, RunningStack, own_coordinator, own_worker
from harness.waiting import HANG, until
from harness.wire import Proxy

from paceline.core.errors import InternalError
from paceline.core.messages import SequenceFailed

POISON = 200
"""Its embedding is not a number: after it the model has no logits."""


@pytest.fixture(scope="module")
def poisoned(pair_paths: Pair, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The draft checkpoint (the smaller one), with input and output embeddings apart."""
    import shutil

    import torch
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("poisoned")
    model = AutoModelForCausalLM.from_pretrained(pair_paths.draft, dtype=torch.float32)
    head = model.get_input_embeddings().weight.detach().clone()
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(head.shape[1], head.shape[0], bias=False)
    with torch.no_grad():
        model.lm_head.weight.copy_(head)
        model.get_input_embeddings().weight[POISON] = float("nan")
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(pair_paths.draft / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def poisoned_draft(poisoned: Path) -> Iterator[str]:
    """The address of a draft worker with this model."""
    with own_worker("draft", poisoned) as address:
        yield address


def check_pools_whole(own: OwnCoordinator) -> None:
    """No block is held on any of its workers."""
    until(
        lambda: all(
            w.info is not None and w.info.cache.free_blocks == w.info.cache.total_blocks
            for w in own.client.status().workers
        ),
        "whole pools",
    )


def failures(draft: Proxy) -> int:
    """Sequences that a draft could not go on with for logits that are not numbers."""
    failed = (event.error for event in list(draft.events) if isinstance(event, SequenceFailed))
    return sum("not numbers" in error.message for error in failed)


def test_nan_target_logits_end_only_their_request(
    pair_paths: Pair, poisoned: Path, poisoned_draft: str
) -> None:
    """NaN in the target, in the same batch as healthy requests; and in a draft, where it costs speed only."""
    with (
        own_worker("target", poisoned) as target,
        own_coordinator(pair_paths, [target], [poisoned_draft]) as own,
    ):
        parameters = {"max_tokens": 60, "ignore_eos": True, "temperature": 1.0, "seed": 5}
        # The sampled text must not contain the poison by itself.
        parameters["logit_bias"] = {POISON: -100.0}
        alone = own.client.generate([5, 6, 7], parameters, timeout=HANG)
        healthy = [Recording(own.address, [5, 6, 7], parameters) for _ in range(3)]
        for stream in healthy:
            stream.wait_for_tokens(5)
        for prompt in ([5, POISON, 7], [POISON]):
            history = Recording(own.address, prompt, parameters).result()
            validate(history, complete=False)
            assert isinstance(history.error, InternalError)
            assert "not numbers" in history.error.message
        for stream in healthy:
            validate(stream.result(), alone.token_ids)
        check_pools_whole(own)


def test_nan_draft_logits_cost_speed_only(faulty: RunningStack, poisoned_draft: str) -> None:
    with (
        Proxy(poisoned_draft, "draft") as draft,
        own_coordinator(faulty.pair, [faulty.stack.address_of("target")], [draft.address]) as own,
    ):
        for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}):
            for mode in ("coupled", "rejection", "block"):
                parameters = {"max_tokens": 24, "ignore_eos": True, **sampling}
                prompt = [5, POISON, 7]
                speculation = {"num_speculative_tokens": 4, "acceptance": mode, "prompt_lookup": False}
                before = failures(draft)
                history = Recording(own.address, prompt, parameters, speculation).result()
                # It was asked, and this is what it said.
                assert failures(draft) > before
                validate(history)
                assert len(history.token_ids) == 24
                if mode == "coupled" or sampling["temperature"] == 0:
                    plain = own.client.generate(
                        prompt, parameters, speculation={"num_speculative_tokens": 0}, timeout=HANG
                    )
                    assert history.token_ids == plain.token_ids
        check_pools_whole(own)
