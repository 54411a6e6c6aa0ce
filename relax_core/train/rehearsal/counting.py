"""Counts every operator of a rank on the ``meta`` device, and provides numbers for calls that need them.

A tensor on ``meta`` has a shape and no numbers. Four kinds of calls need numbers:

* Numbers that the host has copied to the device stay known: row numbers, masks, counts. Results computed only from
  known integers are also known, and can be read back.
* If the host reads an unknown number (a loss, a norm, log-probs), it gets `UNKNOWN`, which is finite. An unknown bool
  is True.
* Routers distribute rows evenly over the experts: the sum of Megatron's routing map over its rows is an even share.
* Other ranks are assumed to behave like this rank: a gather of a known tensor returns one known copy for each rank.

Memory is counted by storage, in multiples of 512 bytes like CUDA's allocator, from the first operator that returns it
to the moment at which torch frees it. Each moment belongs to a phase (`Counting.during`). A change of the phase begins
a new section, and the peak of each section is kept, because peaks of different moments grow differently with the
number of layers.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from relax_core.train.rehearsal.allocator import FREED, GRAIN, Event
from relax_core.train.rehearsal.timeline import Block, Mark

aten = torch.ops.aten
META = "meta"
UNKNOWN = 2.0  # A gradient norm above 1 is clipped, which is the more expensive case.
KNOWN_ELEMENTS = 1 << 22  # Larger tensors are not kept on the host.
_VALUE = "rehearsed_value"  # the attribute of a tensor with known numbers
_MADE = {  # operators that make a tensor on the device without an input tensor on the device
    aten._to_copy.default,
    aten.arange.default,
    aten.arange.start,
    aten.arange.start_step,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.scalar_tensor.default,
}
_TO_HOST, _COPY = aten._to_copy.default, aten.copy_.default
_SUMMED_WIDE = (aten.addmm.dtype, aten.addmm.dtype_out)


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Describes even routing: each row goes to ``per_row`` of ``experts`` experts."""

    experts: int
    per_row: int

    def shares(self, rows: int) -> Tensor:
        """Returns the number of rows of each expert, int64 ``[experts]``."""
        total = rows * self.per_row
        shares = torch.full((self.experts,), total // self.experts, dtype=torch.int64)
        shares[: total % self.experts] += 1
        return shares


@dataclass(slots=True)
class _Allocation:
    number: int
    size: int
    category: str


class _StorageRef(weakref.ref[Any]):
    """Reports when a storage is freed; tensors that autograd has saved keep it alive like any others."""

    __slots__ = ("key",)
    key: int

    def __new__(cls, storage: Any, callback: Any, key: int) -> _StorageRef:
        made = super().__new__(cls, storage, callback)
        made.key = key
        return made

    def __init__(self, storage: Any, callback: Any, key: int) -> None:
        super().__init__(storage, callback)  # type: ignore[call-arg]


@dataclass(slots=True)
class SectionPeak:
    """Holds the largest memory of a section in bytes, and its parts by category."""

    bytes: int = 0
    by_category: dict[str, int] = field(default_factory=dict)


@dataclass(slots=True)
class Messages:
    """Counts the calls of one kind of collective in one group; ``bytes`` are the bytes that this rank sends (rings)."""

    calls: int = 0
    bytes: int = 0


class Counting(TorchDispatchMode):
    """Counts the work of one rank while it is active.

    ``flops`` maps a phase to floating-point operations. ``messages`` maps (phase, collective, group, ranks) to
    `Messages`; collectives of host tensors have groups that begin with "host". ``host_reads`` maps a phase to the
    number of times at which the host waits for a number of the device: each read, and each wait for an event after
    asynchronous copies. ``operators`` counts all operators. ``events`` is the trace of allocations for
    `CachingAllocator`, and ``marks`` are the blocks of layers in it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.routing: Routing | None = None
        self.now = 0
        self.sections: dict[tuple[int, str], SectionPeak] = {}
        self.flops: Counter[str] = Counter()
        self.messages: defaultdict[tuple[str, str, str, int], Messages] = defaultdict(Messages)
        self.host_reads: Counter[str] = Counter()
        self.operators = 0
        self.events: list[Event] = []
        self.marks: list[Mark] = []
        self._phase = self._block = "build"
        self._section = SectionPeak()
        self._by_category: defaultdict[str, int] = defaultdict(int)
        self._live: dict[int, _Allocation] = {}
        self._refs: dict[int, _StorageRef] = {}
        self._allocations = 0
        self._answers: Mapping[Any, Callable[[Any, Any, Any], Any]] = {
            aten._local_scalar_dense.default: self._scalar,
            aten.masked_select.default: self._masked_select,
            aten.nonzero.default: self._nonzero,
            aten.index.Tensor: self._index,
            aten.is_pinned.default: lambda func, args, kwargs: False,
            aten.equal.default: lambda func, args, kwargs: True,
        }

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False: nothing is compiled here. Otherwise torch would wrap every call to turn compilation off."""
        return False

    def clear_counts(self) -> None:
        """Forgets all counts and peaks, but not the memory that is in use."""
        self.sections.clear()
        self.flops.clear()
        self.messages.clear()
        self.host_reads.clear()
        self.operators = 0
        self.events.clear()
        self.marks.clear()
        self.switch(self._phase)

    # -- Phases and categories ------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Sets the phase of the block to ``phase``. After the block the previous phase continues in a new section."""
        before, self._block = self._block, phase
        self.switch(phase)
        try:
            yield
        finally:
            self._block = before
            self.switch(before)

    def switch(self, phase: str) -> None:
        """Begins a section of ``phase``, which ends at the next section or at the end of the block of `during`."""
        self._phase, self._section = phase, SectionPeak()
        self.sections[len(self.sections), phase] = self._section
        self._note_peak()

    def mark(self, block: Block | None) -> None:
        """Begins a block of the trace; None: a part outside of the layers."""
        self.marks.append((len(self.events), block))

    def name(self, tensors: Iterable[Tensor], category: str) -> None:
        """Moves the memory of ``tensors`` to a category; otherwise its category is the phase that allocated it."""
        for tensor in tensors:
            found = self._live.get(tensor.untyped_storage()._cdata)
            if found is not None and found.category != category:
                self._by_category[found.category] -= found.size
                self._by_category[category] += found.size
                found.category = category

    def categories(self) -> dict[str, int]:
        """Returns the bytes that are in use, by category."""
        return dict(self._by_category)

    def count_wait(self) -> None:
        """Counts that the host waits for an event of the device."""
        self.host_reads[self._phase] += 1

    def count_flops(self, count: int) -> None:
        """Adds floating-point operations of a kernel without an operator."""
        self.flops[self._phase] += count

    # -- Memory ---------------------------------------------------------------------------------------------------
    def _track(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        size = -(-storage.nbytes() // GRAIN) * GRAIN
        found = self._live.get(key)
        if found is not None:
            if found.size == size:
                return
            self._freed(self._refs[key])  # The storage was resized (`relax_core.train.state_offload.resized`).
        if not size:
            return
        self._allocations += 1
        self._live[key] = _Allocation(self._allocations, size, self._phase)
        self._refs[key] = _StorageRef(storage, self._freed, key)
        self.now += size
        self._by_category[self._phase] += size
        self.events.append((self._allocations, size))
        if self.now > self._section.bytes:
            self._note_peak()

    def _freed(self, ref: _StorageRef) -> None:
        found = self._live.pop(ref.key)
        del self._refs[ref.key]
        self.now -= found.size
        self._by_category[found.category] -= found.size
        self.events.append((found.number, FREED))

    def _note_peak(self) -> None:
        self._section.bytes = self.now
        self._section.by_category = dict(self._by_category)

    # -- Known numbers --------------------------------------------------------------------------------------------
    def value(self, tensor: Tensor) -> Tensor | None:
        """Returns the numbers of a tensor as a tensor on the host, or None if they are not known."""
        return getattr(tensor, _VALUE, None) if tensor.device.type == META else tensor

    def learn(self, tensor: Tensor, value: Tensor | None) -> None:
        """Sets the numbers of a tensor on the device; floats and large tensors are not kept."""
        if value is not None and value.numel() <= KNOWN_ELEMENTS and not value.is_floating_point():
            setattr(tensor, _VALUE, value)
        elif hasattr(tensor, _VALUE):
            delattr(tensor, _VALUE)

    def read(self, tensor: Tensor) -> Tensor:
        """Returns the value that the host gets if it reads a tensor of the device."""
        found = self.value(tensor)
        if found is not None:
            return found.clone()
        unknown = True if tensor.dtype is torch.bool else UNKNOWN if tensor.is_floating_point() else 0
        return torch.full(tensor.shape, unknown, dtype=tensor.dtype)

    def _host(self, given: Any) -> Any:
        """Returns the arguments of an operator with the tensors and the device of the host."""
        if isinstance(given, Tensor):
            return self.value(given)
        if isinstance(given, list | tuple):
            return type(given)(self._host(part) for part in given)
        if isinstance(given, torch.device):
            return torch.device("cpu")
        return given

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        return func(*(self._host(arg) for arg in args), **{key: self._host(arg) for key, arg in kwargs.items()})

    # -- Operators ------------------------------------------------------------------------------------------------
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs one operator."""
        kwargs = kwargs or {}
        self.operators += 1
        ours = [tensor for tensor in _tensors((args, kwargs)) if tensor.device.type == META]
        if func.namespace == "c10d":
            return self._message(func, args, on_host=not ours)
        answer = self._answers.get(func) if ours else None
        if answer is not None:
            out = answer(func, args, kwargs)
        elif ours and _goes_to_host(func, args, kwargs):
            out = self._to_host(func, args, kwargs)
        else:
            out = self._compute(func, args, kwargs, ours)
        for tensor in _tensors(out):
            if tensor.device.type == META:
                self._track(tensor)
        if ours:
            count = flop_registry.get(func._overloadpacket)
            if count is not None:
                factors = args[:3] if func in _SUMMED_WIDE else args  # torch's formula does not know the dtype
                self.flops[self._phase] += count(*factors, **kwargs, out_val=out)
        return out

    def _compute(self, func: Any, args: Any, kwargs: Any, ours: list[Tensor]) -> Any:
        try:
            out = func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            if not ours or any(self.value(tensor) is None for tensor in ours):
                raise
            found = self._on_host(func, args, kwargs)  # an operator with shapes that depend on numbers
            return [self._put(value) for value in found] if isinstance(found, list | tuple) else self._put(found)
        if not isinstance(out, Tensor) or out.device.type != META or out.is_floating_point():
            return out
        if self._counts_rows(func, args):
            assert self.routing is not None
            self.learn(out, self.routing.shares(args[0].shape[0]))
        elif ours or func in _MADE:
            known = out.numel() <= KNOWN_ELEMENTS and all(self.value(tensor) is not None for tensor in ours)
            try:
                self.learn(out, self._on_host(func, args, kwargs) if known else None)
            except NotImplementedError:  # no kernel for the host
                self.learn(out, None)
        return out

    def _put(self, value: Tensor) -> Tensor:
        out = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=META)
        self.learn(out, value)
        return out

    def _counts_rows(self, func: Any, args: Any) -> bool:
        """Returns whether the operator sums a routing map, bool ``[rows, experts]``, over its rows."""
        return (
            self.routing is not None
            and func is aten.sum.dim_IntList
            and args[0].dtype is torch.bool
            and args[0].shape[1:] == (self.routing.experts,)
            and list(args[1]) == [0]
            and self.value(args[0]) is None
        )

    def _to_host(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        source: Tensor = args[1] if func is _COPY else args[0]
        waits = not (args[2:3] == (True,) if func is _COPY else kwargs.get("non_blocking"))
        self.host_reads[self._phase] += waits
        value = self.read(source)
        if func is _COPY:
            target: Tensor = args[0]
            return target.copy_(value)
        return value if kwargs.get("dtype") is None else value.to(kwargs["dtype"])

    def _scalar(self, func: Any, args: Any, kwargs: Any) -> Any:
        self.host_reads[self._phase] += 1
        return self.read(args[0]).item()

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, mask = args
        known = self.value(mask)
        self.host_reads[self._phase] += 1  # the size of the result
        if known is not None:
            return tensor.new_empty(int(known.sum()))
        assert self.routing is not None, "only a routing map may be unknown"
        assert self.routing.experts in mask.shape, "only a routing map may be unknown"
        return tensor.new_empty(mask.numel() // self.routing.experts * self.routing.per_row)

    def _nonzero(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        known = self.value(args[0])
        assert known is not None, "the number of entries of an unknown tensor that are not zero"
        self.host_reads[self._phase] += 1
        return self._put(known.nonzero())

    def _index(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        tensor, given = args
        indexes: list[Tensor | None] = []
        for index in given:
            if index is None or index.dtype not in (torch.bool, torch.uint8):
                indexes.append(index)
                continue
            known = self.value(index)
            assert known is not None, "the number of rows that an unknown mask selects"
            self.host_reads[self._phase] += 1
            indexes += [self._put(axis) for axis in known.nonzero().unbind(1)]
        ours = [part for part in (tensor, *indexes) if part is not None and part.device.type == META]
        out = self._compute(func, (tensor, indexes), {}, ours)
        assert isinstance(out, Tensor)
        return out

    # -- Collectives ----------------------------------------------------------------------------------------------
    def _message(self, func: Any, args: Any, *, on_host: bool) -> Any:
        name = func._overloadpacket.__name__
        group = next(ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        kind = name.strip("_").replace("_base", "")
        written, read = _written_and_read(kind, args)
        where = f"host {group.group_desc}" if on_host else str(group.group_desc)
        messages = self.messages[self._phase, kind, where, group.size()]
        messages.calls += 1
        messages.bytes += _sent(kind, read=_bytes(read), written=_bytes(written), ranks=group.size())
        if kind.startswith("allgather"):
            self._gather(written, read, ranks=group.size())
        elif kind.startswith("alltoall"):
            for target, source in zip(written, read, strict=False):
                if target.numel() == source.numel():
                    self._receive(target, self.value(source))
        work = torch._C._distributed_c10d.FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)

    def _gather(self, written: list[Tensor], read: list[Tensor], *, ranks: int) -> None:
        known = self.value(read[0])
        if known is not None and len(written) == 1:
            known = torch.cat([known] * ranks)
        for target in written:
            self._receive(target, known)

    def _receive(self, target: Tensor, value: Tensor | None) -> None:
        if target.device.type == META:
            self.learn(target, None if value is None else value.clone().reshape(target.shape))
        elif value is not None:
            target.copy_(value.reshape(target.shape))


def _tensors(given: Any) -> list[Tensor]:
    """Returns the tensors of nested arguments."""
    if isinstance(given, Tensor):
        return [given]
    if isinstance(given, list | tuple):
        return [tensor for part in given for tensor in _tensors(part)] if given else []
    if isinstance(given, dict):
        return [tensor for part in given.values() for tensor in _tensors(part)] if given else []
    return []


def _goes_to_host(func: Any, args: Any, kwargs: Any) -> bool:
    if func is _TO_HOST:
        device = kwargs.get("device")
        return device is not None and torch.device(device).type == "cpu"
    return func is _COPY and args[0].device.type == "cpu"


def _written_and_read(kind: str, args: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Returns the tensors that a collective writes, and the tensors that it sends."""
    if kind in ("barrier", "monitored_barrier"):
        return [], []
    first = _tensors(args[0])
    if kind in ("allreduce", "broadcast", "reduce", "allreduce_coalesced"):
        return first, first
    if kind == "send":
        return [], first
    return first, [] if kind.startswith("recv") else _tensors(args[1])


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def _sent(kind: str, *, read: int, written: int, ranks: int) -> int:
    """Returns the bytes that a rank sends, if reductions and gathers run over a ring."""
    if kind.startswith("recv"):
        return 0
    if kind.startswith("allreduce"):
        return 2 * read * (ranks - 1) // ranks
    if kind.startswith("allgather"):
        return written * (ranks - 1) // ranks
    if kind.startswith(("reduce_scatter", "alltoall")):
        return read * (ranks - 1) // ranks
    return read
