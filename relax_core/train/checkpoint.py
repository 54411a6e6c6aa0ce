"""One train rank's part of a checkpoint: model and optimizer as Megatron's torch_dist, random states beside it.

    <folder>/.metadata, *.distcp, common.pt, metadata.json   Megatron's dist_checkpointing, reshardable over ranks
    <folder>/random_rank_00000.safetensors                   one file a rank

Tensors and common state load with ``weights_only``; ``.metadata`` is the index that torch.distributed.checkpoint itself
writes and reads as a pickle: load only checkpoints that you trust like a program.
"""

from __future__ import annotations

import errno
import logging
import pickle
import random
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from relax_core.train.device import has_cuda
from relax_core.train.megatron_workarounds import create_optimizer_state

if TYPE_CHECKING:
    from relax_core.train.rank import MegatronRank

logger = logging.getLogger(__name__)

# Any number of data-parallel ranks can read what any other number wrote.
_CONTENT = {"distrib_optim_sharding_type": "fully_reshardable"}


def save_backend(backend: MegatronRank, folder: Path) -> None:
    """Writes the state after the newest train step; every rank calls it, and all return when all files are there.

    ``folder`` may exist, but empty. Waits for other ranks at most as long as their process group does. Raises OSError
    where a file cannot be written (on every rank, where torch_dist wrote it), RuntimeError naming ranks that do
    not come.
    """
    assert len(backend.optimizer.state), "there is nothing to save before the first train step"
    if backend.rank == 0:
        folder.mkdir(parents=True, exist_ok=True)
    _wait_for_ranks(backend, f"save {folder}")
    with _write_errors_as_oserror(folder):
        dist_checkpointing.save(
            _sharded_state(backend, is_loading=False),
            str(folder),
            sharded_strategy=_InProcessSave("torch_dist", 1),
            content_metadata=_CONTENT,
        )
        save_file(_random_state(), _random_file(folder, backend.rank), metadata={"ranks": str(backend.world_size)})
    _wait_for_ranks(backend, f"save {folder}")


def load_backend(backend: MegatronRank, folder: Path) -> None:
    """Sets weights, optimizer state and random states to those of `save_backend`; training goes on to the bit.

    The optimizer's settings (betas, weight decay, …) stay those of this run's configuration. Where another number of
    ranks wrote the checkpoint, random streams stay as this run's seed made them. Raises ValueError for a checkpoint
    that is corrupt or of another model, RuntimeError naming ranks that do not come.
    """
    _wait_for_ranks(backend, f"load {folder}")
    create_optimizer_state(backend.optimizer)
    configured = [
        {key: value for key, value in group.items() if key != "params"} for group in backend.optimizer.param_groups
    ]
    with _read_errors_as_valueerror(folder):
        state = dist_checkpointing.load(_sharded_state(backend, is_loading=True), str(folder))
        _load_random_state(backend, folder)
    for index, chunk in enumerate(backend.model_chunks):
        chunk.module.load_state_dict(state[f"model_{index}"])
    backend.optimizer.load_state_dict(state["optimizer"])
    for group, settings in zip(backend.optimizer.param_groups, configured, strict=True):
        group.update(settings)
    _unshare_step_counters(backend.optimizer)


def _unshare_step_counters(optimizer: Any) -> None:
    """0.16.1's distributed optimizer hands all parameters one ``step`` tensor, which each of them would then raise."""
    for _, state in optimizer.state.items():
        state["step"] = state["step"].clone()


def _sharded_state(backend: MegatronRank, *, is_loading: bool) -> ShardedStateDict:
    """What Megatron saves or fills: each tensor with its place in the global one."""
    models = {
        f"model_{index}": chunk.module.sharded_state_dict(metadata=_CONTENT)
        for index, chunk in enumerate(backend.model_chunks)
    }
    optimizer = backend.optimizer.sharded_state_dict(models, is_loading=is_loading, metadata=_CONTENT)
    return {**models, "optimizer": optimizer}


class _InProcessSave(torch_dist.TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format, written by this process.

    Megatron's own writer spawns a manager and forks a process a file: seconds a checkpoint, and a fork of a process
    with Ray's threads can hang.
    """

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> None:
        tensors, _, _ = torch_dist._replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, self.keep_only_main_replica
        )
        dcp.save(
            torch_dist.mcore_to_pyt_state_dict(tensors, False),
            storage_writer=dcp.FileSystemWriter(checkpoint_dir),
            planner=torch_dist.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


# -- random states ----------------------------------------------------------------------------------------------------
def _random_file(folder: Path, rank: int) -> Path:
    return folder / f"random_rank_{rank:05d}.safetensors"


def _random_state() -> dict[str, Tensor]:
    """The states of all random streams of this process, as tensors."""
    _, words, next_gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    mersenne = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python.words": torch.tensor(words),
        "python.gauss": torch.tensor([] if next_gauss is None else [next_gauss], dtype=torch.float64),
        "numpy.key": torch.from_numpy(mersenne["key"].astype(np.int64)),
        "numpy.position": torch.tensor([mersenne["pos"], numpy_state["has_gauss"]]),
        "numpy.gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state | {f"megatron.{stream}": tensor for stream, tensor in tracker.items()}


def _set_random_state(state: Mapping[str, Tensor]) -> None:
    torch.set_rng_state(state["torch"])
    next_gauss: list[float] = state["python.gauss"].tolist()
    random.setstate((3, tuple(state["python.words"].tolist()), next_gauss[0] if next_gauss else None))
    position, has_gauss = state["numpy.position"].tolist()
    key = state["numpy.key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy.gauss"].item()))
    if has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    prefix = "megatron."
    tracker = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)


def _load_random_state(backend: MegatronRank, folder: Path) -> None:
    with safe_open(_random_file(folder, 0), framework="pt") as file:
        ranks = int(file.metadata()["ranks"])
    if ranks != backend.world_size:
        logger.warning(
            "%s was written by %d train rank(s) and is read by %d: random streams start anew from the seed",
            folder, ranks, backend.world_size,
        )  # fmt: skip
        return
    with safe_open(_random_file(folder, backend.rank), framework="pt") as file:
        # Cloned: Megatron's tracker keeps what it is given, and that would keep the file mapped.
        _set_random_state({name: file.get_tensor(name).clone() for name in file.keys()})  # noqa: SIM118 - no mapping


# -- waits and errors -------------------------------------------------------------------------------------------------
def _wait_for_ranks(backend: MegatronRank, doing: str) -> None:
    """Names the ranks that do not come, where a plain collective would only time out."""
    if backend.world_size == 1:
        return
    try:
        dist.monitored_barrier(parallel_state.get_data_parallel_group_gloo(), wait_all_ranks=True)
    except RuntimeError as error:
        raise RuntimeError(f"trainer rank {backend.rank} waited for the others to {doing}: {error}") from error


def _causes(error: BaseException) -> list[tuple[BaseException, traceback.StackSummary]]:
    """What failed, on each rank that says so, with where it was raised."""
    if isinstance(error, CheckpointException):
        return list(error.failures.values())
    return [(error, traceback.extract_tb(error.__traceback__))]


def _is_torch_file_error(error: BaseException, frames: traceback.StackSummary) -> bool:
    """torch's zip reader and writer raise RuntimeErrors, in many words, for what the disk refuses."""
    return isinstance(error, RuntimeError) and frames[-1].filename == torch.serialization.__file__


@contextmanager
def _write_errors_as_oserror(folder: Path) -> Iterator[None]:
    try:
        yield
    except (CheckpointException, RuntimeError, SafetensorError) as error:
        for cause, frames in _causes(error):
            if isinstance(cause, OSError):
                raise OSError(cause.errno, f"{folder}: {cause.strerror}") from error
            if isinstance(cause, SafetensorError) or _is_torch_file_error(cause, frames):
                raise OSError(errno.EIO, f"{folder}: {cause}") from error
        if isinstance(error, CheckpointException):  # no Exception: it would pass every handler
            raise RuntimeError(f"{folder}: {error}") from error
        raise


_UNREADABLE = (
    OSError,
    EOFError,
    ValueError,
    CheckpointException,
    CheckpointingException,
    SafetensorError,
    pickle.UnpicklingError,
)


@contextmanager
def _read_errors_as_valueerror(folder: Path) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, *_UNREADABLE) as error:
        cause, frames = _causes(error)[0]
        if not isinstance(error, _UNREADABLE) and not _is_torch_file_error(cause, frames):
            raise
        raise ValueError(
            f"checkpoint {folder} cannot be read: {type(cause).__name__}: {cause}. It is corrupt, or of another model. "
            "Go on from an older one with resume=<its folder>."
        ) from error
