"""The pretended device itself: what it refuses, what it counts, and what a recording keeps."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from paceline.decoding.transfer import rows_at, to_device
from paceline.engine.backends.captured import CudaGraphs
from tests.cuda.device import PretendedCuda

CUDA = torch.device("cuda:0")


def on_device(*numbers: float) -> Tensor:
    return torch.tensor(numbers, device=CUDA)


def test_tensors_say_which_device_they_are_on(cuda: PretendedCuda) -> None:
    assert on_device(1.0).device == CUDA
    assert (torch.zeros(2, device="cuda:1") + 1).device == torch.device("cuda:1")
    assert on_device(1.0).cpu().device == torch.device("cpu")


def test_a_device_without_number_is_the_current_one(cuda: PretendedCuda) -> None:
    torch.cuda.set_device(1)
    assert torch.zeros(1, device="cuda").device == torch.device("cuda:1")


@pytest.mark.parametrize("other", ["cpu", "cuda:1"])
def test_mixing_devices_is_an_error(cuda: PretendedCuda, other: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        on_device(1.0, 2.0) + torch.ones(2, device=other)


@pytest.mark.parametrize("index", ["cpu", "cuda:1"])
def test_rows_by_a_number_elsewhere_are_an_error(cuda: PretendedCuda, index: str) -> None:
    with pytest.raises(RuntimeError, match="same device"):
        on_device(1.0, 2.0).index_select(0, torch.zeros(1, dtype=torch.int64, device=index))


def test_a_single_number_may_be_on_the_host(cuda: PretendedCuda) -> None:
    tensor = on_device(1.0, 2.0)
    with cuda.counting() as counts:
        found = tensor * torch.tensor(3.0)
    assert found.tolist() == [3.0, 6.0]
    assert counts.num_waits == 0


WAITS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda t: t[0].item(),
    "tolist": lambda t: t.tolist(),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu"),
    "bool": lambda t: bool(t[0] > 0),
    "float": lambda t: float(t[0]),
    "a tensor made of numbers": lambda t: torch.tensor([1.0], device=CUDA),
    "a pageable copy": lambda t: torch.zeros(2).to(CUDA),
    "a pageable copy said not to block": lambda t: t.copy_(torch.zeros(2), non_blocking=True),
    "a pageable tensor sent without blocking": lambda t: torch.zeros(2).to(CUDA, non_blocking=True),
    "a pinned tensor sent": lambda t: torch.zeros(2).pin_memory().to(CUDA),
    "a list as index": lambda t: t[[0, 1]],
    "an index on the host": lambda t: t[torch.tensor([0, 1])],
    "a mask as index": lambda t: t[t > 0],
    "nonzero": lambda t: t.nonzero(),
    "repeats": lambda t: t.repeat_interleave(t.long()),
    "equal": lambda t: torch.equal(t, t),
    "synchronize": lambda t: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("name", WAITS)
def test_each_wait_is_counted(cuda: PretendedCuda, name: str) -> None:
    tensor = on_device(1.0, 2.0)
    with cuda.counting() as counts:
        WAITS[name](tensor)
    assert counts.num_waits == 1


NO_WAITS: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda t: (t * 2 + 1).sum(),
    "views": lambda t: t[None, :1].T,
    "a tensor of one number": lambda t: torch.full((2,), 3.0, device=CUDA),
    "a number written": lambda t: t.__setitem__(0, 3.0),
    "repeats of a known size": lambda t: t.repeat_interleave(t.long(), output_size=3),
    "a tensor sent by its own function": lambda t: to_device(torch.zeros(2), CUDA),
    "rows by numbers": lambda t: rows_at(t, [1, 0]),
    "a pinned copy": lambda t: t.copy_(torch.zeros(2, pin_memory=True), non_blocking=True),
}


@pytest.mark.parametrize("name", NO_WAITS)
def test_what_does_not_wait_is_not_counted(cuda: PretendedCuda, name: str) -> None:
    tensor = on_device(1.0, 2.0)
    with cuda.counting() as counts:
        NO_WAITS[name](tensor)
    assert counts.num_waits == 0


def test_an_event_waits_unless_something_later_has(cuda: PretendedCuda) -> None:
    event, tensor = torch.cuda.Event(), on_device(1.0)
    event.record()
    with cuda.counting() as counts:
        event.synchronize()
        event.record()
        tensor.tolist()
        event.synchronize()
    assert counts.waits == {"event at the test": 1, "copy to the host at the test": 1}


def test_launches_and_bytes_are_counted_by_shapes(cuda: PretendedCuda) -> None:
    table = torch.zeros(100, 8, device=CUDA)
    rows, numbers = torch.zeros(3, dtype=torch.int64, device=CUDA), torch.zeros(4, 8, device=CUDA)
    with cuda.counting() as counts:
        numbers.view(8, 4)[1:].T.unsqueeze(0)  # no work
    assert (counts.launches, counts.num_bytes) == (0, 0)
    with cuda.counting() as counts:
        numbers @ table.T
    assert (counts.launches, counts.num_bytes) == (1, 4 * (4 * 8 + 100 * 8 + 4 * 100))
    with cuda.counting() as counts:
        table.index_select(0, rows)
    assert (counts.launches, counts.num_bytes) == (1, 2 * 3 * 8 * 4 + 3 * 8)


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_recording_is_an_error(cuda: PretendedCuda, name: str) -> None:
    tensor, tried = on_device(1.0, 2.0), []

    def step() -> Tensor:
        if tried:
            WAITS[name](tensor)
        tried.append(1)
        return tensor

    with pytest.raises(RuntimeError, match="not permitted when stream is capturing"):
        CudaGraphs(CUDA)(step)
    cuda.captures.check_sound()


def test_a_replay_repeats_the_device_not_the_host(cuda: PretendedCuda) -> None:
    tensor, on_host = on_device(1.0, 2.0), [10.0]

    def step() -> Tensor:
        doubled = (tensor * 2).view(2, 1)
        return doubled[:, 0] + on_host[0]

    replay = CudaGraphs(CUDA)(step)
    tensor.copy_(on_device(3.0, 4.0))
    on_host[0] = 0.0
    with cuda.counting() as counts:
        found = replay()
    assert counts.launches == 1
    assert counts.num_bytes == 2 * 2 * 8
    assert found.tolist() == [16.0, 18.0]
