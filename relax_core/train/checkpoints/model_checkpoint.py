"""Writes and reads a model's part of a checkpoint: weights, optimizer state and random states, in any layout.

    <folder>/.metadata, *.distcp   torch.distributed.checkpoint, tensors under Hugging Face names (checkpoint_shards.py)
    <folder>/provenance.json       the model, layout and libraries that wrote it (provenance.py)

    weights/<name>                              in the model's dtype, as Hugging Face has it
    main/<name>, exp_avg/…, exp_avg_sq/…        float32: a bfloat16 model's copy, and Adam's moments
    random/<rank>/<stream>                      the random streams of each rank

Ranks in any layout can read a checkpoint of any other layout. A process that is not a rank can read it, too. A save has
two halves: `copy` runs between train steps, and `write` may run in another thread.

Tensors load with ``weights_only``. The index ``.metadata`` of torch.distributed.checkpoint is a pickle.
`PlainIndexReader` reads it and creates only objects of the classes that an index needs.
"""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from msgspec.structs import replace
from torch import Tensor

from relax_core.families.architecture import Architecture
from relax_core.train import process_group
from relax_core.train.checkpoints.checkpoint_shards import (
    WEIGHTS,
    Block,
    Pieces,
    read_errors_as_valueerror,
    read_pieces,
    write_errors_as_oserror,
    write_pieces,
)
from relax_core.train.checkpoints.checkpoint_store import SLOWEST_WRITE_S
from relax_core.train.checkpoints.provenance import (
    Provenance,
    check_same_adapters,
    check_same_frozen_parts,
    check_same_model,
    layout_sizes,
    library_versions,
    model_numbers,
    read_provenance,
    write_provenance,
)
from relax_core.train.device import training_device
from relax_core.train.hf.weight_slices import WeightSlice
from relax_core.train.optimizer import adam_states, create_optimizer_state, set_updates_done, updates_done

if TYPE_CHECKING:
    from relax_core.train.host_states import HostStates
    from relax_core.train.megatron_rank import RankSetup


_TRACKER = "megatron."


def random_state() -> dict[str, Tensor]:
    """Returns the states of torch, Python, numpy, the device and Megatron's tracker; their shapes never change."""
    _, words, next_gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    mersenne = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python.describe": torch.tensor(words),
        "python.gauss": torch.tensor([math.nan if next_gauss is None else next_gauss], dtype=torch.float64),
        "numpy.key": torch.from_numpy(mersenne["key"].astype(np.int64)),
        "numpy.position": torch.tensor([mersenne["pos"], numpy_state["has_gauss"]]),
        "numpy.gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if training_device().cuda:
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state | {_TRACKER + stream: tensor.clone() for stream, tensor in tracker.items()}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Restores the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    next_gauss: float = state["python.gauss"].item()
    random.setstate((3, tuple(state["python.describe"].tolist()), None if math.isnan(next_gauss) else next_gauss))
    position, has_gauss = state["numpy.position"].tolist()
    key = state["numpy.key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy.gauss"].item()))
    if training_device().cuda:
        torch.cuda.set_rng_state(state["cuda"])
    tracker = {name.removeprefix(_TRACKER): tensor for name, tensor in state.items() if name.startswith(_TRACKER)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)


logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """Holds a copy of this rank's part of a checkpoint in host memory; training does not change the copy."""

    pieces: dict[str, Pieces]
    provenance: Provenance


class RankCheckpoint:
    """Writes and reads one rank's part of a model's checkpoints; all ranks call the same methods in the same order.

    ``slices`` are the rank's pieces of the weights. ``head`` is "policy" or "critic". ``host_states`` has the
    optimizer's states if they are on the host.
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        architecture: Architecture,
        slices: Sequence[WeightSlice],
        optimizer: Any,
        head: str,
        host_states: HostStates | None = None,
    ) -> None:
        self._setup = setup
        self._architecture, self._head = architecture, head
        self._slices = slices
        self._optimizer, self._host_states = optimizer, host_states
        # The group is separate, because collectives of the writing thread must not mix with collectives of the train
        # step. Ranks that have finished writing wait in this group for ranks with slower disks.
        self._group = process_group.new_world_group(timeout_s=SLOWEST_WRITE_S)

    def copy(self, *, steps_done: int) -> StateCopy:
        """Copies the state after ``steps_done`` train steps to the host."""
        provenance = replace(self._provenance(steps_done), updates=self._updates_of_all_ranks())
        assert provenance.updates, "a state can be saved only after the first update"
        pieces = {name: piece.copied() for name, piece in self._pieces(saving=True).items()}
        pieces |= {self._stream(name): _whole(tensor) for name, tensor in random_state().items()}
        return StateCopy(pieces=pieces, provenance=provenance)

    def write(self, copy: StateCopy, folder: Path) -> None:
        """Writes a copy; any thread may call it, and all ranks return when all tensors are written.

        Rank 0 also writes provenance.json before it returns. The caller on rank 0 marks the checkpoint as complete, so
        other ranks need not wait for that file. ``folder`` may exist if it is empty. If a file cannot be written,
        raises OSError: on every rank for a file of tensors. If ranks do not arrive within the setup's timeout, raises
        RuntimeError with their numbers.
        """
        self._wait_for_ranks(f"save {folder}")
        with write_errors_as_oserror(folder):
            write_pieces(folder, copy.pieces, group=self._group)
            if self._setup.rank == 0:
                write_provenance(copy.provenance, folder)

    def load(self, folder: Path) -> None:
        """Loads weights, optimizer state and random states from a checkpoint.

        In the checkpoint's layout, training continues bitwise identically. In another layout the random streams start
        from this run's seed. The optimizer's settings (betas, weight decay, …) come from this run's configuration.
        Raises ValueError if the checkpoint is corrupt or of another model. If ranks do not arrive, raises RuntimeError
        with their numbers.
        """
        saved, now = read_provenance(folder), self._provenance(0)
        check_same_model(saved, now, folder=folder)
        check_same_frozen_parts(saved, now, folder=folder)
        check_same_adapters(saved, now, folder=folder)
        self._wait_for_ranks(f"load {folder}")
        create_optimizer_state(self._optimizer, keep=None if self._host_states is None else self._host_states.keep)
        same_ranks = (saved.layout, saved.world_size) == (now.layout, now.world_size)
        streams = {name: _whole(tensor) for name, tensor in random_state().items()} if same_ranks else {}
        pieces = self._pieces(saving=False) | {self._stream(name): stream for name, stream in streams.items()}
        with read_errors_as_valueerror(folder):
            read_pieces(folder, pieces, group=self._group)
        set_updates_done(self._optimizer, saved.updates)
        if same_ranks:
            set_random_state({name: stream.blocks[0].data for name, stream in streams.items()})
        elif self._setup.rank == 0:
            logger.warning(
                "%s was written by %d train rank(s) in the layout %s, and %d rank(s) in the layout %s read it: their "
                "random streams start anew from the seed",
                folder, saved.world_size, saved.layout, now.world_size, now.layout,
            )  # fmt: skip

    # -- Helpers ------------------------------------------------------------------------------------------------
    def _pieces(self, *, saving: bool) -> dict[str, Pieces]:
        """Returns this rank's blocks of every tensor as views.

        If ``saving`` is True, each block is returned on one rank only: blocks that several ranks store are divided
        among these ranks.
        """
        pieces: dict[str, Pieces] = {}

        def add(kind: str, weight: WeightSlice, blocks: Iterator[Block]) -> None:
            pieces.setdefault(kind + weight.rule.hf, Pieces(weight.shape)).blocks.extend(blocks)

        mine = _saved_here(self._slices) if saving else {weight.rule.hf for weight in self._slices}
        parameters = [parameter for weight in self._slices for parameter in weight.parameters]
        states = adam_states(
            self._optimizer, parameters, at=None if self._host_states is None else self._host_states.at
        )
        for weight in self._slices:
            if saving and (weight.is_copy or not _first_of_tensor_parallel(weight)):
                continue
            whole = weight.rule.hf in mine
            for index, parameter in enumerate(weight.parameters[:1] if saving else weight.parameters):
                state = states.get(parameter)
                if whole:
                    add(WEIGHTS, weight, weight.blocks(index, parameter.detach().view(-1)))
                if state is not None and (whole or self._setup.parallel.distributed_optimizer):
                    for kind, flat in state.tensors().items():
                        add(f"{kind}/", weight, weight.blocks(index, flat, start=state.start))
        return {name: piece for name, piece in pieces.items() if piece.blocks}

    def _stream(self, name: str) -> str:
        return f"random/{self._setup.rank}/{name}"

    def _provenance(self, steps_done: int) -> Provenance:
        setup = self._setup
        return Provenance(
            family=self._architecture.family,
            head=self._head,
            dtype=setup.dtype,
            model=model_numbers(self._architecture),
            layout=layout_sizes(setup.parallel),
            world_size=setup.world_size,
            step=steps_done,
            updates=updates_done(self._optimizer),
            time=datetime.now(UTC).isoformat(timespec="seconds"),
            libraries=library_versions(),
            frozen=tuple(setup.frozen),
            lora=None if setup.lora is None or self._head == "critic" else setup.lora,
        )

    def _updates_of_all_ranks(self) -> int:
        """Returns Adam's step counter; a rank that has only frozen parameters gets the counter from the other ranks."""
        updates = torch.tensor(updates_done(self._optimizer))
        if self._setup.frozen and self._setup.world_size > 1:
            dist.all_reduce(updates, dist.ReduceOp.MAX, group=process_group.world_group())
        return int(updates)

    def _wait_for_ranks(self, doing: str) -> None:
        if self._setup.world_size > 1:
            rank, timeout_s = self._setup.rank, self._setup.timeout_s
            process_group.wait_for_ranks(doing, rank=rank, timeout_s=timeout_s, group=self._group)


def _first_of_tensor_parallel(weight: WeightSlice) -> bool:
    """Returns True on the first tensor-parallel rank, which saves tensors that tensor parallelism does not split."""
    return weight.pieces > 1 or weight.rule.expert or parallel_state.get_tensor_model_parallel_rank() == 0


def _saved_here(slices: Sequence[WeightSlice]) -> set[str]:
    """Divides the replicated tensors about equally among data-parallel ranks and returns the names for this rank."""
    dense, experts = parallel_state.get_data_parallel_rank, parallel_state.get_expert_data_parallel_rank
    ranks = {False: dense(with_context_parallel=True), True: experts()}
    loads = {
        False: [0] * parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: [0] * parallel_state.get_expert_data_parallel_world_size(),
    }
    mine = set()
    for weight in slices:
        of_kind = loads[weight.rule.expert]
        lightest = of_kind.index(min(of_kind))
        of_kind[lightest] += weight.views[0].numel()
        if lightest == ranks[weight.rule.expert]:
            mine.add(weight.rule.hf)
    return mine


def _whole(tensor: Tensor) -> Pieces:
    return Pieces(tuple(tensor.shape), [Block((0,) * tensor.dim(), tensor)])
