"""A model's part of a checkpoint: weights, optimizer and random states, whatever layout its ranks have.

    <folder>/.metadata, *.distcp   torch.distributed.checkpoint, its tensors under Hugging Face names (stored_pieces.py)
    <folder>/provenance.json          what made it (provenance.py)

    weights/<name>                              in the model's dtype, as Hugging Face has it
    main/<name>, exp_avg/…, exp_avg_sq/…        float32: a bfloat16 model's copy, and Adam's moments
    random/<rank>/<stream>                      the random streams of each rank

Any layout reads what any other wrote, and so does a process that is no rank. A save has two halves: `copy` stands
on the step path, `write` may run in a thread of its own.

Tensors load with ``weights_only``; ``.metadata`` is the index that torch.distributed.checkpoint itself writes and reads
as a pickle: load only checkpoints that you trust like a program.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from relax_core.families.architecture import Architecture
from relax_core.train.checkpoints.checkpoint_errors import read_errors_as_valueerror, write_errors_as_oserror
from relax_core.train.checkpoints.checkpoint_shards import WEIGHTS, Block, Pieces, read_pieces, write_pieces
from relax_core.train.checkpoints.checkpoint_store import SLOWEST_WRITE_S
from relax_core.train.checkpoints.optimizer_state import (
    adam_states,
    create_optimizer_state,
    set_updates_done,
    updates_done,
)
from relax_core.train.checkpoints.provenance import (
    MadeBy,
    check_same_model,
    layout_sizes,
    library_versions,
    model_numbers,
    read_provenance,
    write_provenance,
)
from relax_core.train.checkpoints.random_state import random_state, set_random_state
from relax_core.train.hf.weight_slices import WeightSlice

if TYPE_CHECKING:
    from relax_core.train.rank_setup import RankSetup

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StateCopy:
    """This rank's part of a checkpoint, in host memory that training does not touch."""

    pieces: dict[str, Pieces]
    provenance: MadeBy


class RankCheckpoint:
    """One rank's end of a model's checkpoints. All ranks call the same methods in the same order.

    ``places``: where its weights are. ``head``: "policy" or "critic".
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        architecture: Architecture,
        places: Sequence[WeightSlice],
        optimizer: Any,
        head: str,
    ) -> None:
        self._setup = setup
        self._architecture, self._head = architecture, head
        self._places = places
        self._optimizer = optimizer
        # Of its own: collectives of a thread that writes must not meet those of the train step, and ranks that have
        # written wait for one whose disk is slower.
        self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=SLOWEST_WRITE_S))

    def copy(self, *, steps_done: int) -> StateCopy:
        """Copies the state after ``steps_done`` train steps to the host."""
        provenance = self._provenance(steps_done)
        assert provenance.updates, "there is nothing to save before the first train step"
        pieces = {name: one.copied() for name, one in self._pieces(saving=True).items()}
        pieces |= {self._stream(name): _whole(tensor) for name, tensor in random_state().items()}
        return StateCopy(pieces=pieces, provenance=provenance)

    def write(self, copy: StateCopy, folder: Path) -> None:
        """Writes a copy, in any thread; all ranks return when all files are there.

        ``folder`` may exist, but empty. Raises OSError where a file cannot be written (on every rank, where it is one
        of the tensors'), RuntimeError naming ranks that do not come within the setup's timeout.
        """
        self._wait_for_ranks(f"save {folder}")
        with write_errors_as_oserror(folder):
            write_pieces(folder, copy.pieces, group=self._group)
            if self._setup.rank == 0:
                write_provenance(copy.provenance, folder)

    def load(self, folder: Path) -> None:
        """Sets weights, optimizer state and random states to those of a checkpoint.

        In the layout that wrote it training goes on to the bit; in another one random streams stay as this run's seed
        made them. The optimizer's settings (betas, weight decay, …) are those of this run's configuration. Raises
        ValueError for a checkpoint that is corrupt or of another model, RuntimeError naming ranks that do not come.
        """
        saved, now = read_provenance(folder), self._provenance(0)
        check_same_model(saved, now, folder=folder)
        self._wait_for_ranks(f"load {folder}")
        create_optimizer_state(self._optimizer)
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
                "%s was written by %d train rank(s) in the layout %s, and is read by %d in %s: random streams start "
                "anew from the seed", folder, saved.world_size, saved.layout, now.world_size, now.layout,
            )  # fmt: skip

    # -- parts --------------------------------------------------------------------------------------------------
    def _pieces(self, *, saving: bool) -> dict[str, Pieces]:
        """This rank's blocks of every tensor, as views. For ``saving`` each block is with one rank only, and those that
        several have are shared out among them."""
        pieces: dict[str, Pieces] = {}

        def add(kind: str, place: WeightSlice, blocks: Iterator[Block]) -> None:
            pieces.setdefault(kind + place.rule.hf, Pieces(place.shape)).blocks.extend(blocks)

        mine = _shared_out(self._places) if saving else {place.rule.hf for place in self._places}
        states = adam_states(self._optimizer, [one for place in self._places for one in place.parameters])
        for place in self._places:
            if saving and (place.is_copy or not _first_of_tensor_parallel(place)):
                continue
            whole = place.rule.hf in mine
            for index, parameter in enumerate(place.parameters[:1] if saving else place.parameters):
                state = states.get(parameter)
                if whole:
                    add(WEIGHTS, place, place.blocks(index, parameter.detach().view(-1)))
                if state is not None and (whole or self._setup.parallel.distributed_optimizer):
                    for kind, flat in state.tensors().items():
                        add(f"{kind}/", place, place.blocks(index, flat, start=state.start))
        return {name: one for name, one in pieces.items() if one.blocks}

    def _stream(self, name: str) -> str:
        return f"random/{self._setup.rank}/{name}"

    def _provenance(self, steps_done: int) -> MadeBy:
        setup = self._setup
        return MadeBy(
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
        )

    def _wait_for_ranks(self, doing: str) -> None:
        """Names the ranks that do not come, where a plain collective would only time out."""
        setup = self._setup
        if setup.world_size == 1:
            return
        try:
            dist.monitored_barrier(self._group, timeout=timedelta(seconds=setup.timeout_s), wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(f"trainer rank {setup.rank} waited for the others to {doing}: {error}") from error


def _first_of_tensor_parallel(place: WeightSlice) -> bool:
    """Of a tensor that is whole on every tensor-parallel rank the first one saves it."""
    return place.pieces > 1 or place.rule.expert or parallel_state.get_tensor_model_parallel_rank() == 0


def _shared_out(places: Sequence[WeightSlice]) -> set[str]:
    """Which of the tensors that all data-parallel ranks have alike this one saves: about equally many elements each."""
    dense, experts = parallel_state.get_data_parallel_rank, parallel_state.get_expert_data_parallel_rank
    ranks = {False: dense(with_context_parallel=True), True: experts()}
    loads = {
        False: [0] * parallel_state.get_data_parallel_world_size(with_context_parallel=True),
        True: [0] * parallel_state.get_expert_data_parallel_world_size(),
    }
    mine = set()
    for place in places:
        of_kind = loads[place.rule.expert]
        lightest = of_kind.index(min(of_kind))
        of_kind[lightest] += place.views[0].numel()
        if lightest == ranks[place.rule.expert]:
            mine.add(place.rule.hf)
    return mine


def _whole(tensor: Tensor) -> Pieces:
    return Pieces(tuple(tensor.shape), [Block((0,) * tensor.dim(), tensor)])
