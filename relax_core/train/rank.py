"""One data-parallel rank of a Megatron model that is trained: its weights, its gradients, one update, its files.

What the policy (backend.py) and the critic (critic_backend.py) have in common; each adds its own head and its own loss.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor

from relax_core.config.schema import OptimizerConfig, ParallelConfig
from relax_core.contracts.algorithm import AlgorithmSpec, LossOutputs, StepTotals
from relax_core.contracts.train import StepMetrics, TrainGroup
from relax_core.train import process_group
from relax_core.train.device import has_cuda, training_device
from relax_core.train.gpt import build_model
from relax_core.train.hf_weights import HfWeights
from relax_core.train.micro_batches import MicroBatcher
from relax_core.train.models.registry import read_model
from relax_core.train.optimizer import build_optimizer, learning_rate, wrap_for_training
from relax_core.train.step_sums import StepSums, add_over_ranks
from relax_core.train.tree import TreeLayout, pack_tree
from relax_core.train.tree_attention import TreeBatch
from relax_core.weights.model_folder import read_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """What a rank is made from. ``store_address``: "host:port" of the TCPStore that rank 0 hosts. ``timeout_s``: of
    every wait for other ranks."""

    model_folder: Path
    family: str
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    total_steps: int
    dtype: str
    algorithm: AlgorithmSpec
    knobs: Any
    rank: int
    world_size: int
    store_address: str
    timeout_s: float
    seed: int


class MegatronRank:
    """``trainable`` False: no gradients and no optimizer. ``value_head``: the model ends in one number a token."""

    def __init__(self, setup: RankSetup, *, trainable: bool = True, value_head: bool = False) -> None:
        if setup.dtype not in DTYPES:
            raise ValueError(f"model.dtype={setup.dtype}: not known. What exists: {', '.join(DTYPES)}.")
        self.family, self.hf_config = read_model(setup.model_folder, setup.family)
        process_group.join(
            setup.parallel,
            rank=setup.rank,
            world_size=setup.world_size,
            store_address=setup.store_address,
            timeout_s=setup.timeout_s,
            seed=setup.seed,
        )
        if not has_cuda():
            torch.set_num_threads(setup.parallel.threads_per_rank)
        self.rank, self.world_size, self.trainable = setup.rank, setup.world_size, trainable
        self._setup, self._parallel = setup, setup.parallel
        self._algorithm, self._knobs = setup.algorithm, setup.knobs
        self._dtype, self._device = DTYPES[setup.dtype], training_device()
        self.model: Any = build_model(self.family, self.hf_config, dtype=self._dtype, value_head=value_head)
        self.model_chunks: list[Any] = [self.model.requires_grad_(trainable)]
        self.optimizer: Any = None
        if trainable:
            sharded = setup.parallel.distributed_optimizer
            self.model_chunks = [wrap_for_training(self.model, distributed_optimizer=sharded, dtype=self._dtype)]
            self.optimizer = build_optimizer(
                setup.optimizer, self.model_chunks, distributed_optimizer=sharded, dtype=self._dtype
            )
        # After the wrapper, which may move the parameters into its own buffer.
        self._weights = HfWeights(self.model, self.family, self.hf_config, value_head=value_head)
        self.load_weights(read_safetensors(setup.model_folder))
        self._step = 0
        self._learning_rate = 0.0
        self._sums = StepSums()
        self._timings_ms: dict[str, float] = {}

    # -- an update ----------------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Clears gradients and sums for an update of train step ``step``, which sets the learning rate."""
        self._step = step
        self._learning_rate = learning_rate(self._setup.optimizer, step=step, total_steps=self._setup.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums = StepSums()
        self._timings_ms = {}

    def finish_step(self) -> StepMetrics:
        """Divides by the global denominator, clips, steps the optimizer.

        Raises on every rank, with the weights untouched: ValueError when no token of the update is trained,
        FloatingPointError when a gradient is not finite. RuntimeError names ranks that do not come in ``timeout_s``.
        """
        with self._timed("reduce"):
            if not all(self._gradient_is_finite(chunk) for chunk in self.model_chunks):
                self._sums.broken_ranks = [self.rank]
            if self.world_size > 1:
                self._wait_for_ranks()
            sums = add_over_ranks(self._sums, self._rank_group())
            if sums.broken_ranks:
                raise FloatingPointError(
                    f"train step {self._step}: the gradient is not finite on rank(s) {sums.broken_ranks}; "
                    f"loss sum {sums.loss}. The weights are untouched."
                )
            if not sums.tokens:
                raise ValueError(f"train step {self._step}: every token is masked, so there is nothing to train on.")
            totals = StepTotals(tokens=sums.tokens, samples=sums.samples, groups=sums.groups)
            denominator = self._algorithm.denominator(totals, self._knobs)
            finalize_model_grads(self.model_chunks)
            for chunk in self.model_chunks:
                chunk.scale_gradients(1.0 / denominator)
        with self._timed("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
            assert updated, "only a loss scaler refuses an update, and none is used"
        return StepMetrics(
            loss=sums.loss / denominator,
            grad_norm=float(grad_norm),
            learning_rate=self._learning_rate,
            tokens=sums.tokens,
            samples=sums.samples,
            logprob_gap_max=sums.gap_max,
            logprob_gap_mean=sums.gap_sum / max(1, sums.gap_tokens),
            logprob_gap_tokens=sums.gap_tokens,
            algorithm={name: total / count for name, (total, count) in sums.algorithm.items() if count},
            timings_ms=self._timings_ms,
        )

    # -- weights and files --------------------------------------------------------------------------------------
    def load_weights(self, tensors: Iterator[tuple[str, Tensor]]) -> None:
        """Sets all weights from Hugging Face names; raises ValueError for a missing, unknown or misshapen one."""
        self._weights.load(tensors)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def save(self, folder: Path) -> None:
        from relax_core.train.checkpoint import save_backend

        save_backend(self, folder)

    def load(self, folder: Path) -> None:
        from relax_core.train.checkpoint import load_backend

        load_backend(self, folder)

    # -- parts --------------------------------------------------------------------------------------------------
    def _to_device(self, layout: TreeLayout) -> TreeBatch:
        return TreeBatch.of(layout, device=self._device, dtype=self._dtype)

    def _column(self, arrays: Sequence[np.ndarray | None]) -> Tensor:
        """One array a group → one tensor on the device."""
        present = [array for array in arrays if array is not None]
        assert len(present) == len(arrays), "a column is there for all groups of a step or for none"
        return torch.from_numpy(np.concatenate(present)).to(self._device)

    def _forward_only(
        self, groups: Sequence[TrainGroup], forward: Callable[[TreeBatch], Sequence[Tensor]]
    ) -> list[tuple[np.ndarray, ...]]:
        """Every tensor ``[tokens, …]`` that ``forward`` gives, cut by group. In micro-batches, without gradient."""
        batcher = MicroBatcher(self._parallel.micro_batch_tokens)
        results: list[tuple[np.ndarray, ...]] = []
        for batch in (*batcher.add(groups), batcher.flush()):
            if batch:
                with torch.no_grad():
                    columns = [tensor.cpu().numpy() for tensor in forward(self._to_device(pack_tree(batch)))]
                ends = np.cumsum([len(group.response_ids) for group in batch])[:-1]
                results += zip(*(np.split(column, ends) for column in columns), strict=True)
        return results

    def _rank_group(self) -> dist.ProcessGroup:
        group = parallel_state.get_data_parallel_group_gloo()
        assert group is not None
        return group

    def _wait_for_ranks(self) -> None:
        """Names the ranks that do not come, where a plain collective would only time out."""
        timeout = timedelta(seconds=self._setup.timeout_s)
        try:
            dist.monitored_barrier(self._rank_group(), timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"train step {self._step}: trainer rank {self.rank} waited for the others, at most "
                f"{self._setup.timeout_s:g} s, and: {error}"
            ) from error

    @staticmethod
    def _gradient_is_finite(chunk: Any) -> bool:
        return all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in chunk.buffers)

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._timings_ms[part] = self._timings_ms.get(part, 0.0) + 1e3 * (time.perf_counter() - start)


def micro_batch_sums(groups: Sequence[TrainGroup], outputs: LossOutputs) -> StepSums:
    """What a micro-batch adds to the update's sums, but for the gap to the engine."""
    mask = np.concatenate([group.loss_mask for group in groups])
    lengths = np.concatenate([group.lengths for group in groups])
    trained = np.logical_or.reduceat(mask, np.cumsum(lengths) - lengths)
    samples_of = np.array([len(group.lengths) for group in groups])
    return StepSums(
        tokens=int(np.count_nonzero(mask)),
        samples=int(np.count_nonzero(trained)),
        groups=int(np.count_nonzero(np.logical_or.reduceat(trained, np.cumsum(samples_of) - samples_of))),
        loss=float(outputs.loss_sum.detach()),
        algorithm={name: (float(total), float(count)) for name, (total, count) in outputs.metric_sums.items()},
    )
