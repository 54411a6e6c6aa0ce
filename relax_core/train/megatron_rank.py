"""Runs one rank of a Megatron model in any layout: its part of the weights, its passes, gradients, updates and files.

The policy (policy_backend.py) and the critic (critic_backend.py) share this class. Each adds its own head and loss.

**The pipeline schedule.** Without a pipeline a micro-batch is computed as soon as it arrives. With a pipeline
micro-batches are collected: a run of Megatron's 1F1B schedule over n micro-batches leaves each of pp stages idle for
(pp - 1) / (n + pp - 1) of the time. Therefore a run starts when `RUNS_OF_STAGES` * pp micro-batches wait, and the last
run when the step ends. If gradients are reduced while other passes compute, only the last backward pass of a step may
start the reduction. The last pass is known only when the step ends, so one more micro-batch waits until then.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from relax_core.config.choices import StatesPlace
from relax_core.config.learning_rate_schedule import learning_rate
from relax_core.config.model_checks import frozen_parts
from relax_core.config.schema import OptimizerConfig, ParallelConfig, RelaxConfig
from relax_core.contracts.algorithm import AlgorithmSpec, LossOutputs, StepTotals
from relax_core.contracts.media import MediaReader
from relax_core.contracts.train import RankTimes, StepMetrics
from relax_core.contracts.tree import NOT_SAMPLED, Episode, TokenTree
from relax_core.families.folder import folder_architecture
from relax_core.families.towers import Towers
from relax_core.registry import find_algorithm
from relax_core.train import process_group
from relax_core.train.checkpoints.model_checkpoint import RankCheckpoint, StateCopy
from relax_core.train.context_parallel import RowSharding
from relax_core.train.device import training_device
from relax_core.train.hf.hf_export import stored_dtypes
from relax_core.train.hf.hf_weights import HfWeights
from relax_core.train.hf.weight_slices import WholeTensor
from relax_core.train.host_states import HostStates
from relax_core.train.lora import Adapters
from relax_core.train.micro_batches import ROW, MicroBatcher, RankClock, TowerWork, pack_tree, with_row_numbers
from relax_core.train.model.gpt import build_chunks
from relax_core.train.model.media_features import finalize_gradients, media_plan
from relax_core.train.model.moe import balance_metrics, clear_counts, router_rows, routers
from relax_core.train.model.tree_attention import TreeBatch
from relax_core.train.optimizer import build_optimizer, freeze_parts, set_main_weights, wrap_for_training
from relax_core.train.parallel_layout import world_size
from relax_core.train.state_offload import StateOffload, resized
from relax_core.weights.folder_stream import open_safetensors
from relax_core.weights.lora_merge import Lora


class NotFinite(msgspec.Struct, frozen=True, kw_only=True):
    """Names the first tensor of a rank that is not finite.

    ``name`` is its Hugging Face name and ``index`` its index in the family's map. ``weight`` is True if the weight
    itself is not finite, and False if only its gradient is not.
    """

    rank: int
    name: str
    index: int
    weight: bool


class StepSums(msgspec.Struct, kw_only=True):
    """Holds counts and sums as Python floats (float64).

    ``samples`` and ``groups`` count those with at least one trained token. ``rows`` counts computed token rows; a row
    that several micro-batches or ranks compute counts once for each. ``algorithm`` maps a metric's name to (sum,
    count). ``broken_ranks`` are the ranks with a gradient that is not finite, and ``not_finite`` names the first such
    tensor of each.
    """

    tokens: int = 0
    samples: int = 0
    groups: int = 0
    rows: int = 0
    loss: float = 0.0
    gap_sum: float = 0.0
    gap_tokens: int = 0
    gap_max: float = 0.0
    algorithm: dict[str, tuple[float, float]] = {}
    broken_ranks: list[int] = []
    not_finite: list[NotFinite] = []

    def add(self, sums: StepSums) -> None:
        """Adds ``other`` to these sums."""
        self.tokens += sums.tokens
        self.samples += sums.samples
        self.groups += sums.groups
        self.rows += sums.rows
        self.loss += sums.loss
        self.gap_sum += sums.gap_sum
        self.gap_tokens += sums.gap_tokens
        self.gap_max = max(self.gap_max, sums.gap_max)
        self.broken_ranks += sums.broken_ranks
        self.not_finite += sums.not_finite
        for name, (total, count) in sums.algorithm.items():
            before = self.algorithm.get(name, (0.0, 0.0))
            self.algorithm[name] = (before[0] + total, before[1] + count)


def add_over_ranks(sums: StepSums, group: dist.ProcessGroup) -> StepSums:
    """Returns the sums over all ranks of a gloo group, added in rank order. Every rank gets the same bits.

    Ranks may know different metrics: a rank without groups in this step knows none.
    """
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return sums
    payload = torch.frombuffer(bytearray(msgspec.msgpack.encode(sums)), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(sizes, torch.tensor([len(payload)]), group=group)
    longest = max(int(size) for size in sizes)
    padded = torch.zeros(longest, dtype=torch.uint8)
    padded[: len(payload)] = payload
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    total = StepSums()
    for part, size in zip(gathered, sizes, strict=True):
        total.add(msgspec.msgpack.decode(part[: int(size)].numpy().tobytes(), type=StepSums))
    return total


def micro_batch_totals(trees: Sequence[TokenTree]) -> StepTotals:
    """Counts the trained part of a micro-batch; a row that two episodes share counts once for each."""
    trained = [tree.trained_episodes() for tree in trees]
    return StepTotals(
        tokens=sum(int(np.count_nonzero(tree.loss_mask[tree.tokens[1]])) for tree in trees),
        samples=sum(int(np.count_nonzero(mask)) for mask in trained),
        groups=sum(tree.counts_group and bool(mask.any()) for tree, mask in zip(trees, trained, strict=True)),
    )


def counted_sums(trees: Sequence[TokenTree]) -> StepSums:
    """Returns the counts that trees without a computation add to the update's sums."""
    totals = micro_batch_totals(trees)
    return StepSums(tokens=totals.tokens, samples=totals.samples, groups=totals.groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputedTrees:
    """Holds the results of a micro-batch, which stay on the device until the update ends.

    ``numbers`` are the loss sum and (sum, count) of each metric of ``metrics``, float64 ``[1 + 2 * metrics]``.
    ``column`` has the model's result for each token, float32 ``[tokens]``: log-probs or values.
    """

    trees: Sequence[TokenTree]
    metrics: Sequence[str]
    numbers: Tensor
    column: Tensor

    @staticmethod
    @torch.no_grad()
    def of(trees: Sequence[TokenTree], outputs: LossOutputs, column: Tensor) -> ComputedTrees:
        """Keeps the results without their graph."""
        pairs = [number for pair in outputs.metric_sums.values() for number in pair]
        numbers = [
            torch.as_tensor(number, dtype=torch.float64, device=column.device) for number in (outputs.loss_sum, *pairs)
        ]
        return ComputedTrees(
            trees=trees, metrics=tuple(outputs.metric_sums), numbers=torch.stack(numbers), column=column.detach()
        )

    def sums(self, numbers: np.ndarray) -> StepSums:
        """Returns the micro-batch's part of the update's sums; ``numbers`` are its numbers, on the host."""
        sums = counted_sums(self.trees)
        sums.rows = sum(tree.computed_rows for tree in self.trees)
        sums.loss, *pairs = numbers.tolist()
        sums.algorithm = dict(zip(self.metrics, zip(pairs[::2], pairs[1::2], strict=True), strict=True))
        return sums


def joined(arrays: Sequence[np.ndarray | None]) -> np.ndarray:
    """Joins one array for each group."""
    present = [array for array in arrays if array is not None]
    assert len(present) == len(arrays), "either all groups of a step have a column or none has it"
    return np.concatenate(present)


def _read_together(parts: Sequence[Tensor]) -> list[np.ndarray]:
    """Returns tensors of one axis as arrays, after one read of the device."""
    return np.split(torch.cat(list(parts)).cpu().numpy(), np.cumsum([len(part) for part in parts[:-1]]))


def gradient_buffers(chunks: Iterable[Any]) -> list[Any]:
    """Returns the buffers of parameters and gradients of Megatron's wrappers."""
    return [buffer for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]


def check_gradients(sums: StepSums, weights: HfWeights, buffers: Iterable[Any], *, rank: int) -> None:
    """Records in ``sums`` whether a gradient of this rank, in ``buffers``, is not finite."""
    # NaN and infinity survive summation, so one sum checks a whole buffer, and one read all buffers.
    totals = [buffer.grad_data.sum() for buffer in buffers]
    if totals and not bool(torch.isfinite(torch.stack(totals)).all()):
        found = first_not_finite(weights, rank=rank)
        sums.broken_ranks, sums.not_finite = [rank], [] if found is None else [found]


def refuse_update(sums: StepSums, *, step: int) -> None:
    """Raises FloatingPointError if the loss or a gradient of any rank is not finite; ``sums`` are over all ranks."""
    kept = "The weights are as they were before this step."
    if sums.broken_ranks:
        raise FloatingPointError(
            f"train step {step}: the gradient is not finite on rank(s) {sums.broken_ranks}"
            f"{_not_finite_text(sums.not_finite)}; loss sum {sums.loss}. {kept}"
        )
    if not math.isfinite(sums.loss):
        raise FloatingPointError(
            f"train step {step}: the loss sum is {sums.loss}, though every gradient is finite. {kept}"
        )


def refuse_weights(parameters: Sequence[Tensor], weights: HfWeights, *, rank: int, step: int, lr: float) -> None:
    """Raises FloatingPointError if the update of train step ``step`` made weights of this rank not finite.

    ``parameters`` are all parameters of the rank. The check costs one pass over them.
    """
    if torch.isfinite(torch.nn.utils.get_total_norm(parameters)):
        return
    found = first_not_finite(weights, rank=rank)  # If the norm only overflowed, no weight is found.
    if found is not None and found.weight:
        raise FloatingPointError(
            f"train step {step}: its update made weights that are not finite on rank {rank}; the first such tensor is "
            f"{found.name}. Resume from a checkpoint with optimizer.lr below {lr:g}, which this step used."
        )


def first_not_finite(weights: HfWeights, *, rank: int) -> NotFinite | None:
    """Returns the first weight of this rank that is not finite, or else the first such gradient, or else None."""
    tensors: tuple[tuple[Callable[[torch.nn.Parameter], Tensor], bool], ...] = (
        (torch.Tensor.detach, True),
        (_gradient, False),
    )
    for tensor_of, weight in tensors:
        for index, name, tensor in weights.parts(tensor_of):
            if not torch.isfinite(tensor).all():
                return NotFinite(index=index, name=name, rank=rank, weight=weight)
    return None


def _gradient(parameter: Any) -> Tensor:
    if not parameter.requires_grad:
        return torch.zeros_like(parameter)  # A frozen parameter has no gradient.
    gradient = parameter.main_grad  # Megatron's wrapper sets it.
    assert isinstance(gradient, Tensor)
    return gradient


def _not_finite_text(found: Sequence[NotFinite]) -> str:
    """Describes the first tensor that is not finite over all ranks; weights come first, because they are the cause."""
    if not found:
        return ""
    first = min(found, key=lambda finite: (not finite.weight, finite.index, finite.rank))
    which = "the first tensor with weights that are not finite" if first.weight else "the first such tensor"
    return f"; {which} is {first.name}"


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """Holds the settings of one rank.

    For ``store_address`` and ``token`` see `open_rank_store`. ``timeout_s`` bounds every wait for other ranks, in
    seconds. ``moe_aux_loss_coef`` weights the load-balancing loss of a mixture of experts. ``banned_token_ids`` are
    tokens that are never sampled, so they have no probability. ``frozen`` are the parts of the model that do not train
    (`relax_core.config.choices.MODEL_PARTS`). ``lora`` has the settings of the policy's
    adapters. ``threads`` is the number of threads of a rank on CPU cores.
    """

    model_folder: Path
    family: str | None
    parallel: ParallelConfig
    optimizer: OptimizerConfig
    total_steps: int
    dtype: str
    algorithm: AlgorithmSpec
    config: Any
    rank: int
    world_size: int
    store_address: str
    timeout_s: float
    seed: int
    moe_aux_loss_coef: float = 0.0
    banned_token_ids: Sequence[int] = ()
    frozen: Sequence[str] = ()
    lora: Lora | None = None
    threads: int = 1
    token: str = field(default="", repr=False)


def rank_setup(
    config: RelaxConfig,
    *,
    model_folder: Path,
    rank: int,
    store_address: str,
    parallel: ParallelConfig | None = None,
    optimizer: OptimizerConfig | None = None,
    token: str = "",
) -> RankSetup:
    """Returns the setup of rank ``rank`` of a model of the run.

    ``parallel`` and ``optimizer`` default to the policy's. `RankSetup` describes the other arguments.
    """
    parallel = parallel or config.parallel
    return RankSetup(
        model_folder=model_folder,
        family=config.model.family,
        parallel=parallel,
        optimizer=optimizer or config.optimizer,
        total_steps=config.run.steps,
        dtype=config.model.dtype,
        algorithm=find_algorithm(config.algo.name),
        config=config.algo,
        rank=rank,
        world_size=world_size(parallel),
        store_address=store_address,
        timeout_s=config.run.stall_timeout_s,
        seed=config.seed,
        moe_aux_loss_coef=config.model.moe_aux_loss_coef,
        banned_token_ids=config.rollout.banned(),
        frozen=frozen_parts(config),
        lora=lora_of(config),
        threads=config.engine.cpu_threads,
        token=token,
    )


def lora_of(config: RelaxConfig) -> Lora | None:
    """Returns the settings of the policy's adapters, or None without LoRA."""
    lora = config.model.lora
    if not lora.rank:
        return None
    return Lora(rank=lora.rank, alpha=lora.alpha, targets=tuple(lora.targets), rslora=lora.rslora)


DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# A rank without groups computes this tree if other ranks' collectives need its part.
_EMPTY_MICRO_BATCH = TokenTree(
    group_uid="none",
    token_ids=np.zeros(2, dtype=np.int32),
    end=np.full(2, 2, dtype=np.int32),
    loss_mask=np.zeros(2, dtype=bool),
    logprobs=np.zeros(2, dtype=np.float32),
    versions=np.array([NOT_SAMPLED, 0], dtype=np.int32),
    episodes=[Episode("none.0", [1], 0.0, {}, [], "none")],
)


class MegatronRank:
    """Holds one rank's model, optimizer and schedule, and computes its part of every update.

    If ``trainable`` is False the rank has no gradients and no optimizer. If ``value_head`` is True the model ends in
    one number per token. The ranks of a data-parallel replica get the same groups. All ranks pack them into the same
    stream. Each rank computes its rows of the stream (sequence and context parallelism) with its heads, experts and
    layers. All ranks of the last pipeline stage compute the loss of the whole replica; one of them reports it.
    ``media`` reads the tensors of media on the first pipeline stage; a text model needs none.
    """

    def __init__(
        self,
        setup: RankSetup,
        *,
        trainable: bool = True,
        value_head: bool = False,
        media: MediaReader | None = None,
    ) -> None:
        if setup.dtype not in DTYPES:
            raise ValueError(f"model.dtype={setup.dtype} is not known. Use one of {', '.join(DTYPES)}.")
        self.architecture = folder_architecture(setup.model_folder, family=setup.family)
        process_group.join(
            setup.parallel,
            rank=setup.rank,
            world_size=setup.world_size,
            store_address=setup.store_address,
            token=setup.token,
            timeout_s=setup.timeout_s,
            seed=setup.seed,
        )
        if not training_device().cuda:
            torch.set_num_threads(setup.threads)
        self.rank, self.world_size, self.trainable = setup.rank, setup.world_size, trainable
        self._setup, self._parallel = setup, setup.parallel
        self._algorithm, self._config = setup.algorithm, setup.config
        self._dtype, self._device = DTYPES[setup.dtype], training_device().torch
        self._build_model(value_head=value_head)
        self._overlap = trainable and self._parallel.overlap
        experts_over_ranks = self._parallel.ep * self._parallel.etp > 1 and self.architecture.experts is not None
        self._computes_empty_batches = self._overlap or experts_over_ranks
        self.tower_work = TowerWork.of(self.architecture, most_patches=self._parallel.micro_batch_patches)
        self._sharding = RowSharding.of_this_rank(sequence_parallel=self._parallel.sequence_parallel)
        # A critic does not replay the experts that come with the groups, because they are the policy's.
        self._replays = not value_head
        self._towers = Towers.of(self.architecture)
        self._media = media_plan(self.architecture, media, self._parallel, self._sharding, device=self._device)
        self._schedule = Schedule(self.model_chunks, self, overlap=self._overlap)
        self._param_gather_pending = False  # True after an update with overlap, until the parameters are gathered.
        if trainable:
            self._copy: StateCopy | None = None  # A state that is copied and may still be written.
            self._checkpoint = RankCheckpoint(
                setup,
                architecture=self.architecture,
                slices=list((self._weights.factor_slices or self._weights.all_slices).values()),
                optimizer=self.optimizer,
                head="critic" if value_head else "policy",
                host_states=self._host_states,
            )
        buffers = gradient_buffers(self.model_chunks) if trainable else []
        self._state_offload = StateOffload(self.models, buffers=buffers, optimizer=self.optimizer)
        self._step = self._steps_done = 0
        self._learning_rate = 0.0
        self._sums = StepSums()
        self._computed: list[ComputedTrees] = []  # since the last read
        self._clock = RankClock()

    def _build_model(self, *, value_head: bool) -> None:
        """Builds this rank's part of the model, loads its weights and, if it trains, builds its optimizer."""
        setup, parallel, trainable = self._setup, self._parallel, self.trainable
        self.models: list[Any] = [
            chunk.requires_grad_(trainable).train(trainable)
            for chunk in build_chunks(
                self.architecture,
                parallel,
                dtype=self._dtype,
                value_head=value_head,
                moe_aux_loss_coef=setup.moe_aux_loss_coef,
            )
        ]
        self.model: Any = self.models[-1]  # On the last pipeline stage this chunk ends in the head.
        self.model_chunks: list[Any] = self.models
        self.optimizer: Any = None
        self._host_states: HostStates | None = None
        self._adapters: Adapters | None = None
        if trainable:
            freeze_parts(self.models, setup.frozen, self.architecture)
            if setup.lora is not None and not value_head:
                self._adapters = Adapters(self.models, self.architecture, setup.lora, seed=setup.seed)
            self.model_chunks = wrap_for_training(self.models, parallel=parallel, dtype=self._dtype)
            self._build_optimizer()
        # The wrapper may move the parameters into its own buffer, so the weights are mapped after it.
        self._weights = HfWeights(self.models, self.architecture, value_head=value_head, adapters=self._adapters)
        self._balanced = list(routers(self.models))
        self._parameters = [parameter.detach() for model in self.models for parameter in model.parameters()]
        self.load_weights(open_safetensors(setup.model_folder))
        if trainable and self._dtype != torch.float32:
            self._load_main_weights(setup.model_folder, value_head=value_head)

    def _build_optimizer(self) -> None:
        config, sharded = self._setup.optimizer, self._parallel.distributed_optimizer
        on_host = config.states is StatesPlace.host
        # Megatron makes all master weights on the device. The gradients' memory is free until they are on the host.
        buffers = gradient_buffers(self.model_chunks) if on_host else []
        freed = [(storage := buffer.grad_data.untyped_storage(), storage.nbytes()) for buffer in buffers]
        for storage, _ in freed:
            resized(storage, 0)
        self.optimizer = build_optimizer(config, self.model_chunks, distributed_optimizer=sharded, dtype=self._dtype)
        if on_host:
            self._host_states = HostStates(self.optimizer, self.models)
        for storage, size in freed:
            resized(storage, size).zero_()

    def _load_main_weights(self, folder: Path, *, value_head: bool) -> None:
        """Initializes the optimizer's float32 copies from the float32 weights of ``folder``, if it has such weights.

        Copies of rounded weights start in the middle of a bfloat16 number's rounding interval. The first updates are
        smaller than half of that interval, so they would not change the model.
        """
        wide = (name for name, dtype in stored_dtypes(folder).items() if dtype == "float32")
        if all(self.architecture.is_float32(name) for name in wide):
            return
        weights = {parameter: parameter.detach().float() for model in self.models for parameter in model.parameters()}
        HfWeights(
            self.models,
            self.architecture,
            value_head=value_head,
            adapters=self._adapters,
            tensor_of=weights.__getitem__,
        ).load(open_safetensors(folder))
        set_main_weights(self.optimizer, weights, at=None if self._host_states is None else self._host_states.at)

    # -- One update ---------------------------------------------------------------------------------------------
    def begin_step(self, step: int) -> None:
        """Clears gradients and sums for an update of train step ``step`` and sets that step's learning rate."""
        assert self._state_offload.on_device, "onload comes first"
        self._step = step
        self._learning_rate = learning_rate(self._setup.optimizer, step=step, total_steps=self._setup.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = self._learning_rate * group["lr_mult"]  # the tower may have its own rate
        for chunk in self.model_chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        self._schedule.begin()
        clear_counts(self._balanced)
        self._sums, self._computed = StepSums(), []
        self._clock = RankClock()

    def accumulate(self, groups: Sequence[TokenTree]) -> None:
        """Runs forward and backward over this replica's groups of one micro-batch, which may be none.

        The schedule may delay the computation until it has enough micro-batches.
        """
        if groups or self._computes_empty_batches:
            self._schedule.add(groups)

    def count(self, groups: Sequence[TokenTree]) -> None:
        """Adds groups without a gradient to the update's counts. Only one rank of all gets them."""
        self._sums.add(counted_sums(groups))

    def finish_step(self) -> StepMetrics:
        """Computes the waiting micro-batches, normalizes and clips the gradient, and steps the optimizer.

        If no token of the update is trained, every rank raises ValueError. If a gradient or the loss is not finite,
        every rank raises FloatingPointError, which names the first such tensor. The weights are unchanged in both
        cases. If the update makes a rank's weights not finite, that rank raises FloatingPointError. If some ranks do
        not arrive within ``timeout_s`` seconds, RuntimeError names them.
        """
        self._schedule.finish()
        with self.timed("backward"):
            training_device().synchronize()
        self._read_computed()
        with self.timed("reduce"):
            sums = self._sums_over_ranks()
            denominator = self._denominator(StepTotals(tokens=sums.tokens, samples=sums.samples, groups=sums.groups))
            if not self._overlap:
                finalize_gradients(self.model_chunks, sharded=self._parallel.shard_media)
            for chunk in self.model_chunks:
                chunk.scale_gradients(1.0 / denominator)
        with self.timed("optimizer"):
            updated, grad_norm, _ = self.optimizer.step()
            assert updated, "Megatron skips an update only for a loss scaler, and none is used"
            self._param_gather_pending = self._overlap
            if not self._overlap:
                self._refuse_weights()
        self._steps_done = self._step + 1
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
            algorithm_counts={name: count for name, (_, count) in sums.algorithm.items() if count},
            moe=self._balance(),
            timings_ms=self._clock.wall_ms,
            rows=sums.rows,
        )

    # -- Weights and files --------------------------------------------------------------------------------------
    def load_weights(self, tensors: Iterable[tuple[str, WholeTensor]]) -> None:
        """Sets all weights from tensors with Hugging Face names.

        Raises ValueError if a weight is missing, unknown, given twice or has the wrong shape.
        """
        self._weights.load(tensors)
        if self.optimizer is not None:
            self.optimizer.reload_model_params()

    def copy_state(self) -> None:
        """Copies the state for a checkpoint to the host.

        `write_copy` writes the copy, also in another thread during training. A new copy replaces an older copy.
        """
        assert self._state_offload.on_device, "onload comes first"
        self.drop_copy()
        self._gather_parameters()
        self._copy = self._checkpoint.copy(steps_done=self._steps_done)

    def write_copy(self, folder: Path) -> None:
        """Writes the copied state to ``folder``; raises as `RankCheckpoint.write` does.

        The copy stays until `drop_copy`, because a failed write may be repeated.
        """
        assert self._copy is not None, "copy_state comes first"
        self._checkpoint.write(self._copy, folder)

    def drop_copy(self) -> None:
        """Frees the copied state."""
        self._copy = None

    def save(self, folder: Path) -> None:
        """Copies the state and writes it to ``folder``; raises as `RankCheckpoint.write` does."""
        self.copy_state()
        self.write_copy(folder)
        self.drop_copy()

    def load(self, folder: Path) -> None:
        """Loads the checkpoint in ``folder``; raises as `RankCheckpoint.load` does."""
        self._checkpoint.load(folder)

    # -- Time sharing of the device ------------------------------------------------------------------------------
    def offload_optimizer(self) -> int:
        """Moves gradients and optimizer state to the host; returns the bytes that are freed on the device.

        The weights stay, because they may be exported. No train step may begin before `onload`.
        """
        self._gather_parameters()  # a gather that still runs would read freed memory
        return self._state_offload.offload(keep_weights=True)

    def offload(self) -> int:
        """Moves the rest of the state to the host; returns the bytes that are freed on the device.

        Until `onload` nothing may use the state; tensors that `export` yielded before are invalid.
        """
        self._gather_parameters()
        return self._state_offload.offload()

    def onload(self) -> None:
        """Returns the state to the device, bit by bit; does nothing if it is there."""
        self._state_offload.onload()

    # -- Weights of the reference --------------------------------------------------------------------------------
    def keep_reference(self) -> None:
        """Keeps the current weights on the host as the reference's. Call it before `load` and the first update.

        With LoRA the reference is the base model, which is in the model anyway.
        """
        if self._adapters is None:
            self._state_offload.keep_reference()

    @contextlib.contextmanager
    def reference_weights(self) -> Iterator[None]:
        """Has the reference's weights in the model while the block runs. The call is collective."""
        self._wait_for_gathers()
        adapters = self._adapters
        with self._state_offload.reference_weights() if adapters is None else adapters.disabled():
            yield
            self._wait_for_gathers()

    def _wait_for_gathers(self) -> None:
        """Waits for gathers of parameters, including a gather that a forward pass started and did not use."""
        self._gather_parameters()
        for chunk in self.model_chunks if self._overlap else ():
            for group in chunk.bucket_groups + chunk.expert_parallel_bucket_groups:
                if group.param_gather_handle is not None:
                    group.start_param_sync(force_sync=True)

    # -- Passes over one micro-batch, which the schedule calls ---------------------------------------------------
    def padded_rows(self, groups: Sequence[TokenTree]) -> int:
        """Returns the number of rows of the groups' stream, pads included."""
        return self._sharding.padded(sum(group.computed_rows for group in groups) or 1)

    def pack(self, groups: Sequence[TokenTree], *, rows: int = 0, trained_only: bool = False) -> TreeBatch:
        """Packs groups into a stream of at least ``rows`` rows.

        If ``trained_only`` is True, log-probs are computed only for trained rows.
        """
        with self.timed("pack"):
            layout = pack_tree(groups or [_EMPTY_MICRO_BATCH], trained_only=trained_only, towers=self._towers)
            self._clock.add_rows(len(layout.token_ids))
            batch = TreeBatch.of(
                layout, groups, device=self._device, dtype=self._dtype, sharding=self._sharding, rows=rows
            )
            if self.architecture.experts is not None:
                weight = self._balance_weight(groups)
                routers = router_rows(batch, self.architecture, replays=self._replays, balance_weight=weight)
                batch = replace(batch, routers=routers)
            if self._media is not None:
                batch = replace(batch, media=self._media.inputs(layout, padded_rows=batch.padded_rows))
            return batch.with_levels(self.architecture.delta_net)

    def forward(self, chunk: Any, batch: TreeBatch) -> Tensor:
        """Returns the output of a chunk of layers: the input of the next chunk or, after the last chunk, of `loss`."""
        with self.timed("forward"):
            hidden: Tensor = chunk(batch)
            return hidden

    def loss(self, batch: TreeBatch, hidden: Tensor) -> Tensor:
        """Returns the summed loss of the whole micro-batch, which is the same on each rank of the last stage.

        It also keeps the micro-batch's results in ``_computed``. If there are no groups it returns 0 times the head's
        output, because the backward pass must still run.
        """
        raise NotImplementedError

    def add_column(self, sums: StepSums, trees: Sequence[TokenTree], column: np.ndarray) -> None:
        """Adds to ``sums`` the figures that follow from `ComputedTrees.column` of a micro-batch."""
        raise NotImplementedError

    def timed(self, part: str) -> AbstractContextManager[None]:
        """Adds the block's time in milliseconds to the update's timing ``part``."""
        return self._clock.timed(part)

    @property
    def times(self) -> RankTimes:
        """Returns the times of this rank's part of the newest update."""
        return self._clock.times()

    # -- Helpers ------------------------------------------------------------------------------------------------
    def _denominator(self, totals: StepTotals) -> float:
        return self._algorithm.denominator(totals, self._config)

    def _balance_weight(self, groups: Sequence[TokenTree]) -> float:
        """Returns the micro-batch's share of the denominator, which is 0 if no token of it is trained.

        A denominator itself is never less than 1.
        """
        totals = micro_batch_totals(groups)
        return self._denominator(totals) if self._setup.moe_aux_loss_coef and totals.tokens else 0.0

    def _balance(self) -> dict[str, float]:
        layers, experts = self.architecture.num_layers, self.architecture.experts
        if experts is None:
            return {}
        world = process_group.world_group() if self.world_size > 1 else None
        return balance_metrics(self._balanced, layers=layers, experts=experts.count, group=world)

    def _column(self, arrays: Sequence[np.ndarray | None]) -> Tensor:
        """Joins one array for each group into one tensor on the device."""
        return torch.from_numpy(joined(arrays)).to(self._device)

    def _forward_only(
        self,
        groups: Sequence[TokenTree],
        columns: Callable[[TreeBatch, Tensor], Sequence[Tensor]],
        *,
        like: Sequence[tuple[torch.dtype, tuple[int, ...]]],
    ) -> list[tuple[np.ndarray, ...]]:
        """Computes ``columns`` for all sampled rows of the groups, in micro-batches and without gradient.

        ``columns`` returns tensors ``[sampled rows, …]``. ``like`` holds the dtype of each tensor and its shape after
        the first axis. Returns for each group one array ``[rows, …]`` for each tensor, with 0 at rows that were not
        sampled. All ranks of the replica get the result.
        """
        assert self._state_offload.on_device, "onload comes first"
        self._gather_parameters()
        numbered = with_row_numbers(groups)
        batcher = MicroBatcher(self._parallel.micro_batch_tokens, tower=self.tower_work)
        batches: list[Sequence[TokenTree]] = [batch for batch in (*batcher.add(numbered), batcher.flush()) if batch]
        most = process_group.max_over_ranks(len(batches)) if self._computes_empty_batches else len(batches)
        empty = [()] * (most - len(batches))
        found = self._schedule.evaluate([*batches, *empty], columns)[: len(batches)]
        if not batches:
            return []
        stored_rows = np.concatenate([piece.extras[ROW][piece.sampled] for batch in batches for piece in batch])
        ends = np.cumsum([group.rows for group in groups])
        whole = []
        for index, (dtype, shape) in enumerate(like):
            if parallel_state.is_pipeline_last_stage():
                column = torch.cat([parts[index] for parts in found])
            else:
                column = torch.empty(len(stored_rows), *shape, dtype=dtype, device=self._device)
            if self._parallel.pp > 1:
                last = parallel_state.get_pipeline_model_parallel_last_rank()
                dist.broadcast(column, last, group=parallel_state.get_pipeline_model_parallel_group())
            values = column.cpu().numpy()
            of_rows = np.zeros((int(ends[-1]), *shape), dtype=values.dtype)
            of_rows[stored_rows] = values
            whole.append(np.split(of_rows, ends[:-1]))
        return list(zip(*whole, strict=True))

    def _read_computed(self) -> None:
        """Adds the results of the micro-batches to the update's sums.

        The host reads them all at once, because each read waits until the device has finished all earlier work.
        """
        computed, self._computed = self._computed, []
        if not computed:
            return
        with self.timed("sums"):
            numbers = _read_together([each.numbers for each in computed])
            columns = _read_together([each.column for each in computed])
            for each, own_numbers, column in zip(computed, numbers, columns, strict=True):
                sums = each.sums(own_numbers)
                self.add_column(sums, each.trees, column)
                self._sums.add(sums)

    def _sums_over_ranks(self) -> StepSums:
        """Returns the update's sums, which are the same on every rank; raises the errors of `finish_step`."""
        if self.world_size > 1:
            process_group.wait_for_ranks(f"train step {self._step}", rank=self.rank, timeout_s=self._setup.timeout_s)
        if self._overlap:
            finalize_gradients(self.model_chunks, sharded=self._parallel.shard_media)  # It waits for the reductions.
        check_gradients(self._sums, self._weights, gradient_buffers(self.model_chunks), rank=self.rank)
        sums = add_over_ranks(self._sums, process_group.world_group())
        refuse_update(sums, step=self._step)
        if not sums.tokens:
            raise ValueError(f"train step {self._step}: every token is masked, so there is nothing to train on.")
        return sums

    def _gather_parameters(self) -> None:
        """Gathers the parameters of an update with overlap before something other than a forward pass reads them.

        With overlap the next forward pass gathers each parameter when it uses it. This call is collective.
        """
        if self._param_gather_pending:
            for chunk in self.model_chunks:
                chunk.start_param_sync(force_sync=True)
            self._param_gather_pending = False
            self._refuse_weights()

    def _refuse_weights(self) -> None:
        lr = self._learning_rate
        refuse_weights(self._parameters, self._weights, rank=self.rank, step=self._step, lr=lr)


RUNS_OF_STAGES = 4

Columns = TypeVar("Columns")
Groups = Sequence[TokenTree]


class Schedule:
    """Runs the micro-batches of an update through this rank's model chunks.

    If ``overlap`` is True, gradients are reduced while other passes compute.
    """

    def __init__(self, chunks: Sequence[Any], passes: MegatronRank, *, overlap: bool) -> None:
        self._chunks, self._passes, self._overlap = chunks, passes, overlap
        self._stages = parallel_state.get_pipeline_model_parallel_world_size()
        self._window = 1 if self._stages == 1 else RUNS_OF_STAGES * self._stages
        self._waiting: list[Groups] = []

    def begin(self) -> None:
        """Discards the micro-batches of an update that failed."""
        self._waiting = []

    def add(self, groups: Groups) -> None:
        """Adds one micro-batch to the update and runs the waiting micro-batches if there are enough of them."""
        self._waiting.append(groups)
        if len(self._waiting) >= self._window + self._overlap:
            window, self._waiting = self._waiting[: self._window], self._waiting[self._window :]
            self._train(window, last=False)

    def finish(self) -> None:
        """Runs the micro-batches that still wait; with overlap the reduction of their gradients then still runs."""
        if self._waiting:
            window, self._waiting = self._waiting, []
            self._train(window, last=True)

    def evaluate(self, batches: Sequence[Groups], columns: Callable[[TreeBatch, Tensor], Columns]) -> list[Columns]:
        """Returns ``columns`` of each micro-batch and the last chunk's output, without gradient; [] on other stages."""
        with torch.no_grad():
            if self._stages == 1:
                made = map(self._passes.pack, batches)
                return [columns(batch, self._passes.forward(self._chunks[0], batch)) for batch in made]
            results: list[Columns] = []
            for start in range(0, len(batches), self._window):
                window = batches[start : start + self._window]
                results += self._pipeline(
                    window, lambda batch: lambda hidden, non_loss_data: columns(batch, hidden), forward_only=True
                )[: len(window)]
            return results

    def _train(self, window: Sequence[Groups], *, last: bool) -> None:
        reduces = self._overlap and last
        with contextlib.ExitStack() as quiet:
            if self._overlap and not last:
                for chunk in self._chunks:
                    quiet.enter_context(chunk.no_sync())
            if self._stages == 1:
                self._plain(window)
                return
            with self._passes.timed("pipeline"):
                no_tokens = torch.zeros((), dtype=torch.int)  # Given a token count, Megatron does not divide the loss.
                self._pipeline(
                    window,
                    # The schedule frees its outputs and refuses to free a view, so it gets a copy.
                    lambda batch: lambda hidden: (self._passes.loss(batch, hidden).clone(), no_tokens, None),
                    reduces=reduces,
                )

    def _plain(self, window: Sequence[Groups]) -> None:
        for groups in window:
            batch = self._passes.pack(groups, trained_only=True)
            loss = self._passes.loss(batch, self._passes.forward(self._chunks[0], batch))
            with self._passes.timed("backward"):
                loss.backward()

    def _pipeline(
        self,
        window: Sequence[Groups],
        last_stage: Callable[[TreeBatch], Callable[..., Any]],
        *,
        forward_only: bool = False,
        reduces: bool = False,
    ) -> list[Any]:
        """Runs Megatron's schedule once; returns, on the last stage, the results of ``last_stage``'s loss functions."""
        interleaved = len(self._chunks) > 1
        if interleaved:  # It requires a multiple of the stages, and equal lengths because its messages carry no shapes.
            window = [*window, *[()] * (-len(window) % self._stages)]
        rows = max(map(self._passes.padded_rows, window)) if interleaved else 0
        batches = [self._passes.pack(groups, rows=rows, trained_only=not forward_only) for groups in window]

        def forward_step(waiting: Iterator[TreeBatch], chunk: Any) -> tuple[Tensor, Callable[..., Any]]:
            batch = next(waiting)
            return self._passes.forward(chunk, batch), last_stage(batch)

        # The schedule starts the reduction of gradients only in the last backward pass of the last run.
        no_sync = [chunk.no_sync for chunk in self._chunks] if reduces else None
        self._chunks[0].config.no_sync_func = no_sync if no_sync is None or interleaved else no_sync[0]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self._chunks],
            model=list(self._chunks),
            num_microbatches=len(batches),
            seq_length=rows,
            micro_batch_size=1,
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
        )
        assert isinstance(results, list)
        return results
