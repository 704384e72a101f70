"""A pretended CUDA device: the numbers of a CPU with the devices, waits, launches and recordings of a GPU.

Operations on tensors of different devices are errors. Each wait of the host is counted by its place and is an
error inside a recording. A recording keeps the operations on the device alone: a replay repeats them, and
nothing that the host did meanwhile.

Not shown: what streams do (one at a time is pretended), the numerics of a GPU's kernels, alignment. One
operation counts as one launch, whatever the number of its kernels.
"""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Self
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from paceline.decoding.cuda import kernels
from tests.cuda import gumbel_kernels
from tests.cuda.captures import Captures, Pool
from tests.cuda.card import CardMemory

aten: Final = torch.ops.aten
CPU: Final = torch.device("cpu")
NUM_DEVICES: Final = 2
OWN: Final = tuple(
    f"{path}/"
    for package in ("paceline", "draft_worker", "target_worker", "transformers")
    if (spec := importlib.util.find_spec(package)) is not None
    for path in spec.submodule_search_locations or ()
)
"""Folders of the code that a wait is told to be in."""
MOVES: Final = {aten._to_copy, aten.to, aten.copy_, aten.cpu}
"""They alone may read on one device and write on another."""
INDEXED: Final = {aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_}
"""Their indices may be on the host, from where they are copied."""
SIZED_BY_NUMBERS: Final = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_dim, aten.equal}
READ_ROWS: Final = {aten.index, aten.index_select, aten.embedding, aten.gather}
"""They read as much of their first tensor as they return."""
WRITE_ROWS: Final = {aten.index_put_, aten.index_copy_, aten.scatter_, aten.index_add_}
"""They write as much of it as they are given."""


@dataclass
class Counts:
    """What the host and the device did."""

    waits: collections.Counter[str] = field(default_factory=collections.Counter)
    """Of the host for the device, by reason and place."""
    launches: int = 0
    """Operations that a device would start kernels for; a replay is one."""
    num_bytes: int = 0
    """Read and written by operations, each as if by itself: by shapes, those of replays included."""

    @property
    def num_waits(self) -> int:
        """Of all places."""
        return self.waits.total()


class PretendedTensor(torch.Tensor):
    """A tensor that says it is on a CUDA device; `inside` has the numbers.

    What torch's bindings would ask a CUDA build for has a method here.
    """

    inside: Tensor

    @staticmethod
    def __new__(cls, inside: Tensor, device: torch.device) -> Self:
        with torch.inference_mode(False):
            new: Self = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls,
                inside.size(),
                strides=inside.stride(),
                dtype=inside.dtype,
                storage_offset=inside.storage_offset(),
                device=device,
            )
        new.inside = inside
        device_now().hold(new)
        return new

    @classmethod
    def __torch_dispatch__(cls, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return device_now().run(op, args, kwargs or {})

    def copy_(self, source: Tensor, non_blocking: bool = False) -> Tensor:  # type: ignore[override]
        return device_now().run(aten.copy_.default, (self, source, non_blocking), {})

    def contiguous(self, **_: Any) -> Tensor:  # type: ignore[override]
        return device_now().run(aten.contiguous.default, (self,), {})

    def __invert__(self) -> Tensor:
        return device_now().run(aten.bitwise_not.default, (self,), {})

    def nonzero(self, **_: Any) -> Tensor:  # type: ignore[override]
        return device_now().run(aten.nonzero.default, (self,), {})

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        """For debuggers and failed assertions: no wait."""
        return f"{self.inside!r} on {self.device}"

    def item(self) -> Any:
        return device_now().run(aten._local_scalar_dense.default, (self,), {})

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise TypeError("can't convert a CUDA tensor to numpy")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert a CUDA tensor to numpy")

    def __float__(self) -> float:
        return float(self.item())

    def __int__(self) -> int:
        return int(self.item())

    def __index__(self) -> int:
        return int(self.item())

    def __bool__(self) -> bool:
        return bool(self.item())

    def data_ptr(self) -> int:
        return self.inside.data_ptr()

    def __getitem__(self, key: Any) -> Tensor:
        view, indices = _basic_part(self, key)
        return device_now().run(aten.index.Tensor, (view, indices), {}) if indices else view

    def __setitem__(self, key: Any, value: Any) -> None:
        view, indices = _basic_part(self, key)
        if not isinstance(value, Tensor):
            value = torch.full((), value, dtype=self.dtype, device=self.device)
        if indices:
            device_now().run(aten.index_put_.default, (view, indices, value), {})
        else:
            device_now().run(aten.copy_.default, (view, value), {})


def _basic_part(tensor: Tensor, key: Any) -> tuple[Tensor, list[Tensor | None]]:
    """A key as torch takes it apart: numbers, slices and None as views, then the indices that are left."""
    run = device_now().run
    parts = key if isinstance(key, tuple) else (key,)
    taken = sum(p is not None and p is not Ellipsis for p in parts)
    view, dim, indices = tensor, 0, list[Tensor | None]()
    for part in parts:
        if part is Ellipsis:
            dim += tensor.dim() - taken
        elif part is None:
            view, dim = run(aten.unsqueeze.default, (view, dim), {}), dim + 1
        elif isinstance(part, slice):
            start, stop, step = part.indices(view.shape[dim])
            if (start, stop, step) != (0, view.shape[dim], 1):
                view = run(aten.slice.Tensor, (view, dim, start, max(start, stop), step), {})
            dim += 1
        elif isinstance(part, int):
            view = run(aten.select.int, (view, dim, part), {})
        else:
            indices += [None] * (dim - len(indices))
            indices.append(part if isinstance(part, Tensor) else torch.as_tensor(part))
            dim += 1
    return view, indices


_current: list[PretendedCuda] = []
_pinned: set[int] = set()
"""Addresses of the memory on the host that a device may read while the host goes on."""


def device_now() -> PretendedCuda:
    """The one that is entered."""
    return _current[-1]


class PretendedCuda(TorchDispatchMode):
    """Two pretended CUDA devices as long as it is entered, on one thread."""

    def __init__(self, *, noise_kernels: bool = True) -> None:
        """`noise_kernels`: coupled noise is made as by Triton's kernels; otherwise by torch operations.

        Triton can neither compile for this device nor interpret its tensors.
        """
        super().__init__()
        self._noise_kernels = gumbel_kernels if noise_kernels else None
        self.counts = Counts()
        self.waits_so_far = 0
        """Whatever is counted."""
        self.captures = Captures()
        self.memory = CardMemory()
        self._counts_outside = self.counts
        """While something is recorded, those of what is not."""
        self._current_index = 0
        self._patches = contextlib.ExitStack()

    def __enter__(self) -> Self:
        _current.append(self)
        before = torch.__future__.get_overwrite_module_params_on_conversion()
        torch.__future__.set_overwrite_module_params_on_conversion(True)
        self._patches.callback(torch.__future__.set_overwrite_module_params_on_conversion, before)
        for name, instead in self._instead_of_cuda().items():
            self._patches.enter_context(patch.object(torch.cuda, name, instead))
        end = self.captures.end_allocate_to_pool
        self._patches.enter_context(patch.object(torch._C, "_cuda_endAllocateToPool", end))
        for name in ("tensor", "as_tensor"):
            self._patches.enter_context(patch.object(torch, name, _made_on_host(getattr(torch, name))))
        # Under the mode torch would ask whether CUDA is there.
        self._patches.enter_context(patch.object(Tensor, "pin_memory", lambda tensor: _pin(tensor.clone())))
        self._patches.enter_context(patch.object(kernels, "_tried", lambda device: self._noise_kernels))
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._patches.close()
        _current.pop()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(op, args, kwargs or {})

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """What is done meanwhile is counted apart, and nowhere else."""
        before, self.counts = self.counts, Counts()
        try:
            yield self.counts
        finally:
            self.counts = before

    def wait(self, why: str) -> None:
        """The host waits for the device. Raises RuntimeError where it must not."""
        own = [f for f in traceback.extract_stack() if f.filename.startswith(OWN)]
        place = f"{'/'.join(own[-1].filename.split('/')[-2:])}:{own[-1].lineno}" if own else "the test"
        self.captures.wait(why, place)
        self.counts.waits[f"{why} at {place}"] += 1
        self.waits_so_far += 1

    def run(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """One operation, on whatever device its tensors are."""
        name, flat = op.overloadpacket, tree_flatten((args, kwargs))[0]
        there = [t for t in flat if isinstance(t, PretendedTensor)]
        here = [t for t in flat if isinstance(t, Tensor) and not isinstance(t, PretendedTensor)]
        asked = next((d for d in flat if isinstance(d, torch.device)), CPU if name is aten.cpu else None)
        device = self._numbered(asked or (there[0].device if there else CPU))
        if there or device.type == "cuda":
            if name not in MOVES and there:
                self._check_devices(op, there, here, device)
            self._count_waits(op, args, kwargs, here, device)
        if kwargs.get("pin_memory"):
            return _pin(op(*args, **kwargs | {"pin_memory": False}))
        bare_args, bare_kwargs = tree_map(_bare, args), tree_map(_bare, kwargs)
        out = op(*bare_args, **bare_kwargs)
        if there or device.type == "cuda":
            self._count_work(op, bare_args, bare_kwargs, out)
        if writes_first(op):
            return args[0]
        if "out" in kwargs:
            return kwargs["out"]
        if device.type != "cuda":
            return out
        return tree_map(lambda t: PretendedTensor(t, device) if isinstance(t, Tensor) else t, out)

    def _numbered(self, device: torch.device) -> torch.device:
        on_cuda = device.type == "cuda" and device.index is None
        return torch.device("cuda", self._current_index) if on_cuda else device

    def _check_devices(
        self, op: Any, there: Sequence[Tensor], here: Sequence[Tensor], device: torch.device
    ) -> None:
        """As on a device: a single number may be on the host, and so may indices, which are then copied."""
        devices = {t.device for t in there} | {t.device for t in here if t.dim()}
        if len(devices | {device}) == 1:
            return
        if len({t.device for t in there}) > 1 or op.overloadpacket not in INDEXED:
            names = sorted({str(t.device) for t in (*there, *here)})
            raise RuntimeError(f"expected all tensors to be on the same device: {op} on {names}")
        self.wait("index from the host")

    def _count_waits(
        self,
        op: Any,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        here: Sequence[Tensor],
        device: torch.device,
    ) -> None:
        name = op.overloadpacket
        if name is aten._local_scalar_dense or name is aten.is_nonzero:
            self.wait("a number read")
        if name in MOVES and (here or device == CPU):
            later = kwargs.get("non_blocking") or (name is aten.copy_ and True in args[2:3])
            if not (later and here and here[0].untyped_storage().data_ptr() in _pinned):
                self.wait(f"copy to the {'device' if here else 'host'}")
        repeats = "Tensor repeats" in str(op._schema) and kwargs.get("output_size") is None
        if name in SIZED_BY_NUMBERS or repeats:
            self.wait(str(name))
        if name in INDEXED and any(t is not None and t.dtype == torch.bool for t in args[1]):
            self.wait("mask as index")

    def _count_work(self, op: Any, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        """Of bare tensors: a launch unless all that comes back are views; repeated by a replay."""
        name = op.overloadpacket
        results = [t for t in tree_flatten(out)[0] if isinstance(t, Tensor)]
        read = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in read}
        new = [t for t in results if t.untyped_storage().data_ptr() not in known]
        in_place = writes_first(op) or "out" in kwargs
        if not in_place and not new and results:
            return
        if str(name).startswith("aten.empty") or str(name) == "aten.new_empty":
            return
        moved = bytes_moved(name, read, results)
        self.counts.launches += 1
        self.counts.num_bytes += moved
        tape = self.captures.open
        if isinstance(tape, _Tape):
            tape.steps.append(_Step(op, args, kwargs, [] if in_place else results, moved))

    def _instead_of_cuda(self) -> dict[str, Any]:
        """What is used of `torch.cuda`."""
        return {
            "_lazy_init": lambda: None,
            "is_available": lambda: True,
            "is_initialized": lambda: False,
            "device_count": lambda: NUM_DEVICES,
            "current_device": lambda: self._current_index,
            "set_device": self._set_device,
            "get_device_capability": lambda *_: (9, 0),
            "synchronize": lambda *_: self.wait("synchronize"),
            "Event": lambda **_: _Event(),
            "CUDAGraph": _Tape,
            **self.captures.instead_of_cuda(),
            **self.memory.instead_of_cuda(self._index_of),
        }

    def hold(self, tensor: PretendedTensor) -> None:
        """A tensor takes memory of its device, or of the pool that is being recorded in."""
        self.memory.hold(tensor, tensor.inside, self._index_of(tensor.device), self.captures.pool)

    def _index_of(self, device: torch.device | int | None) -> int:
        if isinstance(device, int):
            return device
        return self._current_index if device is None or device.index is None else device.index

    def _set_device(self, device: torch.device | int) -> None:
        self._current_index = device if isinstance(device, int) else device.index or 0

    def begin_capture(self, tape: _Tape, pool: Pool) -> None:
        """What is done from now on is recorded, and counts when it is replayed."""
        self.captures.begin(tape, pool)
        self._counts_outside, self.counts = self.counts, Counts()

    def end_capture(self, tape: _Tape) -> None:
        """What is done from now on counts again."""
        pool = self.captures.pool
        if self.captures.open is tape:
            self.counts = self._counts_outside
        self.captures.end(tape)
        assert pool is not None
        self.memory.keep_graph(tape, pool)


class _Event:
    """A place in the stream. To wait for it costs nothing once the host has waited for something later."""

    def __init__(self) -> None:
        self._waits_before: int | None = None

    def record(self) -> None:
        self._waits_before = device_now().waits_so_far

    def synchronize(self) -> None:
        if self._waits_before == device_now().waits_so_far:
            device_now().wait("event")


@dataclass
class _Step:
    op: Any
    args: Any
    kwargs: dict[str, Any]
    results: list[Tensor]
    """What it returned, where a replay leaves it again; none if it writes to what it is given."""
    num_bytes: int


class _Tape:
    """In the place of a CUDA graph: the operations on the device, on the tensors that they had."""

    def __init__(self) -> None:
        self.steps: list[_Step] = []
        self.valid = True

    def capture_begin(self, pool: Pool = (0, 0), capture_error_mode: str = "global") -> None:
        device_now().begin_capture(self, pool)

    def capture_end(self) -> None:
        device_now().end_capture(self)

    def replay(self) -> None:
        with torch.utils._python_dispatch._disable_current_modes():
            for step in self.steps:
                made = tree_flatten(step.op(*step.args, **step.kwargs))[0]
                for kept, new in zip(step.results, made, strict=False):
                    kept.copy_(new)
        counts = device_now().counts
        counts.launches += 1
        counts.num_bytes += sum(step.num_bytes for step in self.steps)


def _made_on_host(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Tensors of Python's numbers are made on the host and copied."""

    def made(data: Any, *, device: Any = None, **more: Any) -> Tensor:
        if device is None or torch.device(device).type != "cuda":
            return make(data, device=device, **more)
        return make(data, **more).to(torch.device(device))

    return made


def _pin(tensor: Tensor) -> Tensor:
    address = tensor.untyped_storage().data_ptr()
    _pinned.add(address)
    weakref.finalize(tensor, _pinned.discard, address)
    return tensor


def _bare(value: Any) -> Any:
    """What the CPU is given in its place."""
    if isinstance(value, PretendedTensor):
        return value.inside
    return CPU if isinstance(value, torch.device) else value


def writes_first(op: Any) -> bool:
    arguments = op._schema.arguments
    alias = arguments[0].alias_info if arguments else None
    return alias is not None and alias.is_write


def bytes_moved(name: Any, read: Sequence[Tensor], results: Sequence[Tensor]) -> int:
    """Bytes that the operation `name` reads and writes, by shapes; of a table only the rows it takes."""
    if name in READ_ROWS:
        return 2 * sum(map(bytes_of, results)) + sum(map(bytes_of, read[1:]))
    if name in WRITE_ROWS:
        return 2 * sum(map(bytes_of, read[1:]))
    if name is aten.copy_:
        return sum(map(bytes_of, read))
    return sum(map(bytes_of, read)) + sum(map(bytes_of, results))


def bytes_of(tensor: Tensor) -> int:
    """Of its different numbers: what is expanded is read once."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0]
    return int(np.prod(sizes, dtype=np.int64)) * tensor.itemsize
