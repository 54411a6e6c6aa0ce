"""The Megatron training back end: one data-parallel rank's part of the trainer (contracts/train.py)."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from relax_core.contracts.algorithm import AlgorithmSpec, LossInputs, LossOutputs, StepTotals
from relax_core.contracts.train import StepMetrics, TrainGroup
from relax_core.train import process_group
from relax_core.train.device import has_cuda, training_device
from relax_core.train.gpt import build_model
from relax_core.train.hf_weights import HfWeights
from relax_core.train.logprobs import chunked_logprobs
from relax_core.train.micro_batches import MicroBatcher
from relax_core.train.models.registry import read_model
from relax_core.train.optimizer import build_optimizer, learning_rate, wrap_for_training
from relax_core.train.step_sums import StepSums, add_over_ranks
from relax_core.train.tree import TreeLayout, pack_tree
from relax_core.train.tree_attention import TreeBatch
from relax_core.weights.model_folder import read_safetensors

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class MegatronBackend:
    """Implements `relax_core.contracts.train.TrainBackend` on megatron-core.

    ``store_address``: "host:port" of the TCPStore that rank 0 hosts. ``timeout_s``: of every wait for other ranks.
    ``trainable`` False: no gradients and no optimizer; what actor_fwd and reference use.
    """

    def __init__(
        self,
        *,
        model_folder: Path,
        family: str,
        parallel: ParallelConfig,
        optimizer: OptimizerConfig,
        total_steps: int,
        temperature: float,
        dtype: str,
        algorithm: AlgorithmSpec,
        knobs: Any,
        rank: int,
        world_size: int,
        store_address: str,
        timeout_s: float,
        seed: int,
        trainable: bool = True,
    ) -> None:
        if dtype not in DTYPES:
            raise ValueError(f"model.dtype={dtype}: not known. What exists: {', '.join(DTYPES)}.")
        if temperature <= 0:
            raise ValueError(f"rollout.temperature={temperature}: training needs more than 0; 1.0 is usual.")
        self.family, self.hf_config = read_model(model_folder, family)
        process_group.join(
            parallel, rank=rank, world_size=world_size, store_address=store_address, timeout_s=timeout_s, seed=seed
        )
        if not has_cuda():
            torch.set_num_threads(parallel.threads_per_rank)
        self.rank, self.world_size, self.trainable = rank, world_size, trainable
        self._parallel, self._optimizer_config, self._total_steps = parallel, optimizer, total_steps
        self._algorithm, self._knobs, self._timeout_s = algorithm, knobs, timeout_s
        self._inverse_temperature = 1.0 / temperature
        self._dtype, self._device = DTYPES[dtype], training_device()
        self.model = build_model(self.family, self.hf_config, dtype=self._dtype)
        self.model_chunks: list[Any] = [self.model.requires_grad_(trainable)]
        self.optimizer: Any = None
        if trainable:
            sharded = parallel.distributed_optimizer
            self.model_chunks = [wrap_for_training(self.model, distributed_optimizer=sharded, dtype=self._dtype)]
            self.optimizer = build_optimizer(
                optimizer, self.model_chunks, distributed_optimizer=sharded, dtype=self._dtype
            )
        # After the wrapper, which may move the parameters into its own buffer.
        self._weights = HfWeights(self.model, self.family, self.hf_config)
        self.load_weights(read_safetensors(model_folder))
        self._step = 0
        self._learning_rate = 0.0
        self._sums = StepSums()
        self._timings_ms: dict[str, float] = {}

    # -- a train step -------------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Clears gradients and sums; ``step`` sets the learning rate."""
        self._step = step
        self._learning_rate = learning_rate(self._optimizer_config, step=step, total_steps=self._total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._sums = StepSums()
        self._timings_ms = {}

    def accumulate(self, groups: Sequence[TrainGroup]) -> None:
        """Forward and backward over this rank's groups of one micro-batch (may be empty on a rank)."""
        if not groups:
            return
        with self._timed("pack"):
            layout = pack_tree(groups)
            tree = self._to_device(layout)
        with self._timed("forward"):
            logprobs = self._logprobs(tree)
            inputs = self._loss_inputs(groups, layout, logprobs)
            outputs = self._algorithm.loss(inputs, self._knobs)
        with self._timed("backward"):
            outputs.loss_sum.backward()
        with self._timed("sums"):
            self._sums.add(micro_batch_sums(groups, logprobs.detach().cpu().numpy(), outputs))

    def finish_step(self) -> StepMetrics:
        """Divides by the global denominator, clips, steps the optimizer.

        Raises on every rank, with the weights untouched: ValueError when no token of the step is trained,
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

    def logprobs(self, groups: Sequence[TrainGroup]) -> list[np.ndarray]:
        """Log-probs of the current weights, one float32 ``[tokens]`` a group. No gradient."""
        batcher = MicroBatcher(self._parallel.micro_batch_tokens)
        results: list[np.ndarray] = []
        for batch in (*batcher.add(groups), batcher.flush()):
            if batch:
                with torch.no_grad():
                    flat = self._logprobs(self._to_device(pack_tree(batch))).cpu().numpy()
                results += np.split(flat, np.cumsum([len(group.response_ids) for group in batch])[:-1])
        return results

    # -- weights and files --------------------------------------------------------------------------------------
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights under Hugging Face names, in map order; the tensors are valid until the next step."""
        return self._weights.export()

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

    def offload(self) -> None:
        """Does nothing on a CPU, where device and host share memory."""
        self._refuse_on_cuda("offload")

    def onload(self) -> None:
        self._refuse_on_cuda("onload")

    # -- parts --------------------------------------------------------------------------------------------------
    def _to_device(self, layout: TreeLayout) -> TreeBatch:
        return TreeBatch.of(layout, device=self._device, dtype=self._dtype)

    def _logprobs(self, tree: TreeBatch) -> Tensor:
        """Of each response token under logits / temperature, float32 ``[tokens]``."""
        hidden = self.model_chunks[0](tree)
        return chunked_logprobs(
            hidden[tree.predicting_rows],
            self.model.output_weight(),
            tree.targets,
            inverse_temperature=self._inverse_temperature,
            chunk_rows=self._parallel.logprob_chunk_tokens,
        )

    def _loss_inputs(self, groups: Sequence[TrainGroup], layout: TreeLayout, logprobs: Tensor) -> LossInputs:
        def column(arrays: list[np.ndarray | None]) -> Tensor:
            present = [array for array in arrays if array is not None]
            assert len(present) == len(groups), "a column is there for all groups of a step or for none"
            return torch.from_numpy(np.concatenate(present)).to(self._device)

        rollout = column([group.rollout_logprobs for group in groups])
        first = groups[0]
        return LossInputs(
            logprobs=logprobs,
            old_logprobs=rollout if first.old_logprobs is None else column([g.old_logprobs for g in groups]),
            rollout_logprobs=rollout,
            advantages=column([group.advantages for group in groups]),
            loss_mask=column([group.loss_mask for group in groups]),
            sample_ids=torch.from_numpy(layout.sample_ids).to(self._device),
            num_samples=layout.num_samples,
            reference_logprobs=(
                None if first.reference_logprobs is None else column([g.reference_logprobs for g in groups])
            ),
        )

    def _rank_group(self) -> dist.ProcessGroup:
        group = parallel_state.get_data_parallel_group_gloo()
        assert group is not None
        return group

    def _wait_for_ranks(self) -> None:
        """Names the ranks that do not come, where a plain collective would only time out."""
        timeout = timedelta(seconds=self._timeout_s)
        try:
            dist.monitored_barrier(self._rank_group(), timeout=timeout, wait_all_ranks=True)
        except RuntimeError as error:
            raise RuntimeError(
                f"train step {self._step}: trainer rank {self.rank} waited for the others, at most "
                f"{self._timeout_s:g} s, and: {error}"
            ) from error

    @staticmethod
    def _gradient_is_finite(chunk: Any) -> bool:
        return all(bool(torch.isfinite(buffer.grad_data.sum())) for buffer in chunk.buffers)

    def _refuse_on_cuda(self, what: str) -> None:
        if has_cuda():
            raise ValueError(f"mode.name=colocate: {what} is not built for GPUs yet. Use mode=async.")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._timings_ms[part] = self._timings_ms.get(part, 0.0) + 1e3 * (time.perf_counter() - start)


def micro_batch_sums(groups: Sequence[TrainGroup], logprobs: np.ndarray, outputs: LossOutputs) -> StepSums:
    """What a micro-batch adds to the step's sums. ``logprobs``: float32 ``[tokens]``, of the step's own forward.

    The gap is |log-prob here - log-prob in the engine| over trained tokens that the step's own weights sampled.
    """
    mask = np.concatenate([group.loss_mask for group in groups])
    lengths = np.concatenate([group.lengths for group in groups])
    trained = np.logical_or.reduceat(mask, np.cumsum(lengths) - lengths)
    samples_of = np.array([len(group.lengths) for group in groups])
    gap = _fresh_gap(groups, mask, logprobs)
    return StepSums(
        tokens=int(np.count_nonzero(mask)),
        samples=int(np.count_nonzero(trained)),
        groups=int(np.count_nonzero(np.logical_or.reduceat(trained, np.cumsum(samples_of) - samples_of))),
        loss=float(outputs.loss_sum.detach()),
        gap_sum=float(gap.sum(dtype=np.float64)),
        gap_tokens=gap.size,
        gap_max=float(gap.max(initial=0.0)),
        algorithm={name: (float(total), float(count)) for name, (total, count) in outputs.metric_sums.items()},
    )


def _fresh_gap(groups: Sequence[TrainGroup], mask: np.ndarray, logprobs: np.ndarray) -> np.ndarray:
    fresh = [np.zeros(len(g.loss_mask), dtype=bool) if g.fresh is None else g.fresh for g in groups]
    counted = mask & np.concatenate(fresh)
    rollout = np.concatenate([group.rollout_logprobs for group in groups])
    return np.abs(logprobs[counted] - rollout[counted])
