"""The supervised stack with its real processes and a tiny random pair."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from harness.pair import Pair
from harness.refusals import refused
from harness.stacks import RunningStack, running_stack, stack_config
from harness.waiting import until

from paceline.client import SamplingParams, WorkerState
from paceline.core.errors import InvalidArgumentError, TokenizerMismatchError
from paceline.supervisor import StackConfig, discard, serve_stack

SAMPLING = SamplingParams(max_tokens=16, seed=5, ignore_eos=True)
DRAFTS: dict[str, Any] = {"num_speculative_tokens": 2, "prompt_lookup": False}
"""What is drafted is the draft worker's: nothing is copied from the text. A service that chooses K itself
would begin to draft in its thirteenth round, or some rounds later."""
OF_THE_DRAFT: dict[str, Any] = {
    "draft_port": 1,
    "draft_device": "cpu",
    "draft_dtype": "float32",
    "draft_threads": 1,
    "draft_metrics_port": 0,
    "lookahead_branches": 0,
    "lookahead_sequences": 1,
    "draft": {"threads": 1},
}
"""What says nothing of a stack without a draft."""


def test_the_stack_generates(tiny_stack: RunningStack) -> None:
    result = tiny_stack.client.generate("def", SAMPLING, speculation=DRAFTS)
    assert len(result.token_ids) == 16
    assert result.speculative_decoding.num_draft_tokens > 0
    for worker in tiny_stack.client.status().workers:
        assert worker.info.process_id == tiny_stack.stack.pid(worker.role)
        assert worker.address == tiny_stack.stack.address_of(worker.role)


@pytest.mark.parametrize("role", ["draft", "target", "coordinator"])
def test_a_restarted_process_keeps_its_address_and_tokens(tiny_stack: RunningStack, role: str) -> None:
    """A killed worker left its socket file, and is reached through it again."""
    stack, client = tiny_stack.stack, tiny_stack.client

    def local_sockets() -> list[str]:
        return [worker.info.local_socket for worker in client.status().workers]

    def all_there() -> bool:
        workers = client.status().workers
        pids = [each.info and each.info.process_id for each in workers if each.state is WorkerState.READY]
        return pids == [stack.pid(each.role) for each in workers]

    address, sockets = stack.address_of(role), local_sockets()
    before = client.generate("def", SAMPLING, speculation=DRAFTS)
    through = len(tiny_stack.log.find("frames go through"))
    pid = stack.kill(role)
    status = stack.wait_for_restart(role, pid)
    assert status.pid == stack.pid(role) != pid
    assert stack.address_of(role) == address
    tiny_stack.wait_until_ready()
    until(all_there, "both workers")
    until(lambda: len(tiny_stack.log.find("frames go through")) > through, "the way through the socket")
    after = client.generate("def", SAMPLING, speculation=DRAFTS, timeout=60)
    assert local_sockets() == sockets
    assert after.token_ids == before.token_ids
    assert after.speculative_decoding.num_draft_tokens > 0


def test_different_vocabularies_prevent_the_start(tiny_pair: Pair, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(tiny_pair.draft, other)
    file = other / "tokenizer.json"
    file.write_text(file.read_text().replace("<|endoftext|>", "<|end|>"))
    started: list[str] = []
    with pytest.raises(TokenizerMismatchError, match="do not share a vocabulary") as refused:  # noqa: SIM117
        with serve_stack(stack_config(tiny_pair, draft_model=str(other)), sink=started.append):
            pytest.fail("it must not start")
    assert str(tiny_pair.target) in refused.value.message
    assert str(other) in refused.value.message
    assert started == []


def test_an_unreadable_tokenizer_is_named(tiny_pair: Pair, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json cannot be read"):  # noqa: SIM117
        with serve_stack(stack_config(tiny_pair, draft_model=str(tmp_path))):
            pytest.fail("it must not start")


def test_an_occupied_port_ends_the_start_with_a_message(tiny_pair: Pair, tiny_stack: RunningStack) -> None:
    taken = int(tiny_stack.address.rpartition(":")[2])
    with pytest.raises(InvalidArgumentError, match=f"^port: .*{taken} is in use"):  # noqa: SIM117
        with serve_stack(stack_config(tiny_pair, draft_model=None, port=taken), sink=discard):
            pytest.fail("it must not start")


def test_each_draft_model_has_a_worker_and_all_propose(tiny_pair: Pair) -> None:
    """The second draft is the target itself: what it proposes for the sequence is always accepted."""
    models = {"draft": str(tiny_pair.draft), "draft-2": str(tiny_pair.target)}
    with running_stack(tiny_pair, draft_model=tuple(models.values())) as running:
        stack, client = running.stack, running.client
        assert stack.roles == ("target", *models, "coordinator")
        drafts = [worker for worker in client.status().workers if worker.role == "draft"]
        assert {worker.info.model: worker.info.process_id for worker in drafts} == {
            model: stack.pid(name) for name, model in models.items()
        }
        alone = client.generate("def", SAMPLING, speculation={"num_speculative_tokens": 0})
        both = client.generate("def", SAMPLING, speculation=DRAFTS)
        one = client.generate("def", SAMPLING, speculation=DRAFTS | {"drafts_per_sequence": 1})
        assert both.token_ids == one.token_ids == alone.token_ids
        assert sum(both.speculative_decoding.acceptance_histogram[:2]) <= 1, "but for the last round"
        assert both.speculative_decoding.num_rounds < one.speculative_decoding.num_rounds
        stack.wait_for_restart("draft-2", stack.kill("draft-2"))
        assert client.generate("def", SAMPLING, speculation=DRAFTS).token_ids == alone.token_ids


def test_without_a_draft_every_token_is_the_targets(tiny_pair: Pair, tiny_stack: RunningStack) -> None:
    """And the stack's socket files go with it."""
    with running_stack(tiny_pair, draft_model=None) as plain:
        assert plain.stack.roles == ("target", "coordinator")
        (worker,) = plain.client.status().workers
        assert worker.state is WorkerState.READY
        socket = Path(worker.info.local_socket)
        assert socket.is_socket()
        assert socket.parent.stat().st_mode & 0o077 == 0, "nobody else may enter"
        result = plain.client.generate("def", SAMPLING, speculation={"prompt_lookup": False})
        assert result.token_ids == tiny_stack.client.generate("def", SAMPLING).token_ids
        # Of two tokens every pair comes again soon.
        two = {"temperature": 0, "max_tokens": 40, "ignore_eos": True, "allowed_token_ids": (5, 6)}
        copied = plain.client.generate("def", two, speculation={"num_speculative_tokens": 4})
    assert not socket.parent.exists()
    assert result.speculative_decoding.num_draft_tokens == 0
    assert copied.speculative_decoding.num_prompt_lookups > 0


@pytest.mark.parametrize(
    ("field", "values"),
    [
        *((name, {"draft_model": None, name: value}) for name, value in OF_THE_DRAFT.items()),
        ("target.support_mass", {"target": {"support_mass": 0.9}}),
        ("draft.pre_verify", {"draft": {"pre_verify": False}}),
        ("target_port", {"target_port": 70000}),
        ("draft_dtype", {"draft_dtype": "int4"}),
        ("port", {"port": -1}),
        ("block_size", {"block_size": 0}),
        ("num_speculative_tokens", {"num_speculative_tokens": 99}),
        ("lease_seconds", {"target": {"lease_seconds": 0}}),
        ("draft.wrong", {"draft": {"wrong": 1}}),
        ("coordinator.wrong", {"coordinator": {"wrong": 1}}),
        *(("start_timeout", {"start_timeout": value}) for value in (0, -1.0, math.nan, math.inf, 1e300)),
        ("local_sockets", {"local_sockets": True, "certificates": "folder"}),
    ],
)
def test_an_invalid_stack_configuration_is_refused(field: str, values: dict[str, Any]) -> None:
    with refused(field):
        StackConfig(**values)


@pytest.mark.parametrize(("cores", "branches", "sequences"), [(1, 0, 1), (2, 8, 1), (3, 8, 256)])
def test_a_draft_drafts_ahead_when_cores_are_free(
    monkeypatch: pytest.MonkeyPatch, cores: int, branches: int, sequences: int
) -> None:
    monkeypatch.setattr("paceline.supervisor.stack_config.usable_cores", lambda: tuple(range(cores)))
    cpu: dict[str, Any] = {"target_device": "cpu", "draft_device": "cpu"}

    def ahead(**values: Any) -> tuple[int, int]:
        draft = StackConfig(**cpu, **values).worker_config("draft")
        return draft.lookahead_branches, draft.lookahead_sequences

    assert ahead() == (branches, sequences)
    assert StackConfig(**cpu).worker_config("target").pre_verify is (cores > 1), "it takes the draft's core"
    assert StackConfig(**cpu, target={"pre_verify": True}).worker_config("target").pre_verify
    assert ahead(lookahead_branches=3, lookahead_sequences=5) == (3, 5)
    with refused("lookahead_sequences"):
        ahead(lookahead_sequences=0)


def test_the_workers_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(6)), raising=False)
    both = StackConfig()
    assert (both.worker_config("target").threads, both.worker_config("draft").threads) == (3, 3)
    alone = StackConfig(draft_model=None)
    assert alone.worker_config("target").threads == 5, "the coordinator needs one besides"
    assert StackConfig(draft_threads=1).worker_config("draft").threads == 1
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: {0}, raising=False)
    assert StackConfig().worker_config("draft").threads == 1
    assert alone.worker_config("target").threads == 1
