"""The types of every key in conf/. Values and their documentation live in the YAML beside them.

`algo`, `reward` and `env` are typed by their plug-in's own `config` dataclass (config/plugin_types.py), so that a
newcomer's file brings its settings along. OmegaConf 2.3 has no Literal: enums stand for choices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from omegaconf import MISSING


class ModeName(Enum):
    colocate = "colocate"
    asynchronous = "async"


class OnStale(Enum):
    drop = "drop"
    mask = "mask"


class Surplus(Enum):
    drop = "drop"
    keep = "keep"


class Partial(Enum):
    in_place = "in_place"
    abort = "abort"


class AdvantagesPlace(Enum):
    auto = "auto"
    role = "role"


class Schedule(Enum):
    constant = "constant"
    cosine = "cosine"
    linear = "linear"


class Overlong(Enum):
    drop = "drop"
    truncate_left = "truncate_left"
    truncate_middle = "truncate_middle"
    error = "error"


class Recompute(Enum):
    none = "none"
    selective = "selective"
    full = "full"


class WeightTransportName(Enum):
    auto = "auto"
    shared_memory = "shared_memory"
    gloo = "gloo"
    nccl = "nccl"
    cuda_ipc = "cuda_ipc"
    disk = "disk"


class LauncherKind(Enum):
    local = "local"
    slurm = "slurm"
    ray_job = "ray_job"


@dataclass
class ModelConfig:
    name: str = MISSING
    family: str = MISSING  # of relax_core/families/table.py
    path: str | None = None  # a Hugging Face folder
    builtin: str | None = None  # a tiny model that Relax makes itself
    task: str | None = None  # generated task of the builtin model's warm start
    shape: str | None = None  # published dimensions to plan with while there is no path
    dtype: str = MISSING  # float32 | bfloat16
    moe_aux_loss_coef: float = 0.0  # of a mixture of experts


@dataclass
class ModalityConfig:
    name: str = MISSING


@dataclass
class ForwardLayout:
    """How a role that only computes log-probs is cut into ranks; the sizes mean what they mean in `ParallelConfig`."""

    dp: int = MISSING
    tp: int = MISSING
    pp: int = MISSING
    cp: int = MISSING
    ep: int = MISSING
    etp: int = MISSING


FORWARD_SIZES = tuple(size.name for size in fields(ForwardLayout))


@dataclass
class ParallelConfig:
    name: str = MISSING
    dp: int = MISSING
    tp: int = MISSING
    pp: int = MISSING
    vpp: int = MISSING  # chunks of layers that each pipeline rank holds
    cp: int = MISSING
    ep: int = MISSING
    etp: int = MISSING
    sequence_parallel: bool = MISSING
    recompute: Recompute = MISSING
    distributed_optimizer: bool = MISSING
    overlap: bool = MISSING
    micro_batch_tokens: int = MISSING  # packed token rows a micro-batch holds at most
    logprob_chunk_tokens: int = MISSING  # token rows whose logits exist at one time
    threads_per_rank: int = MISSING
    actor_fwd: ForwardLayout = field(default_factory=ForwardLayout)
    reference: ForwardLayout = field(default_factory=ForwardLayout)


@dataclass
class PlacementConfig:
    name: str = MISSING
    nodes: int = MISSING
    gpus_per_node: int = MISSING  # 0: CPU cores
    gpu_memory_gib: float = MISSING
    roles: dict[str, int] = field(default_factory=dict)  # role → GPUs; empty: all roles share all GPUs


@dataclass
class ModeConfig:
    name: ModeName = MISSING
    max_staleness: int = MISSING
    on_stale: OnStale = MISSING


@dataclass
class EngineConfig:
    name: str = MISSING
    dtype: str | None = None  # None: model.dtype
    count: int = MISSING
    tp: int = MISSING  # GPUs that one engine spans
    host: str = MISSING
    port: int = MISSING
    max_running_samples: int = MISSING
    max_total_tokens: int = MISSING
    context_length: int | None = MISSING  # None until it is derived, before the start (plan/data/context_length.py)
    threads: int = MISSING
    start_timeout_s: float = MISSING
    request_timeout_s: float = MISSING
    sync_timeout_s: float = MISSING
    silent_s: float = MISSING
    weight_transport: WeightTransportName = MISSING
    # Of engine=sglang only; with another engine they stay at these values.
    python: str | None = None
    urls: list[str] = field(default_factory=list)
    token_file: str | None = None
    mem_fraction: float | None = None
    deterministic: bool | None = None
    flags: dict[str, Any] = field(default_factory=dict)

    @property
    def context_tokens(self) -> int:
        """Prompt and response tokens of one sample at most, of a configuration that is about to run."""
        assert self.context_length is not None, "preflight derives it"
        return self.context_length


@dataclass
class BusConfig:
    name: str = MISSING
    lease_s: float = MISSING
    call_timeout_s: float = MISSING
    inline_bytes: int = MISSING
    max_row_bytes: int = MISSING
    storage_units: int | None = None  # of bus=transfer_queue only


@dataclass
class DataConfig:
    name: str = MISSING
    path: str | None = None
    paths: Any = None  # a list of files, or a mapping from files to weights, instead of path
    eval_path: str | None = None
    prompt_key: str = MISSING
    answer_key: str = MISSING
    task: str | None = None  # a generated task instead of a file
    size: int = MISSING  # rows of a generated task
    eval_size: int = MISSING
    shuffle: bool = MISSING
    max_bad_rows: float = 0.05
    overlong: Overlong = Overlong.drop
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)


@dataclass
class TrackerConfig:
    name: str = MISSING
    tensorboard: bool = MISSING
    jsonl: bool = MISSING


@dataclass
class LauncherConfig:
    """launcher=local, and what a run reads wherever it is. The other launchers' keys are in the classes below."""

    name: LauncherKind = MISSING
    ray_address: str | None = None  # of launcher=local; the other launchers set it themselves
    nodes: int = MISSING
    ray_logical_cpus: int = MISSING
    object_store_mb: int = MISSING


@dataclass
class SlurmLauncherConfig(LauncherConfig):
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    gpus_per_node: int = MISSING
    cpus_per_node: int = MISSING
    memory_gb: float | None = None
    time_limit_min: int = MISSING
    checkpoint_s: int = MISSING
    max_requeues: int = MISSING
    array_parallelism: int = MISSING
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    follow: bool = MISSING
    dry_run: bool = MISSING


@dataclass
class RayJobLauncherConfig(LauncherConfig):
    address: str = MISSING
    token_file: str | None = None
    working_dir: str | None = None
    python: str = MISSING
    env: list[str] = field(default_factory=list)
    follow: bool = MISSING
    manifest: bool = MISSING
    image: str | None = None
    gpus_per_node: int = MISSING
    cpus_per_node: int = MISSING
    memory_gb: float = MISSING
    volume_claim: str | None = None
    volume_path: str = MISSING
    namespace: str = MISSING


LAUNCHERS: dict[str, type[LauncherConfig]] = {
    "local": LauncherConfig,
    "slurm": SlurmLauncherConfig,
    "ray_job": RayJobLauncherConfig,
}


DEFAULT_WARMUP_STEPS = 10


@dataclass
class OptimizerConfig:
    lr: float = MISSING
    critic_lr: float | None = None  # of the critic; None: lr
    min_lr_ratio: float = MISSING
    schedule: Schedule = MISSING
    warmup_steps: int | None = None  # None: DEFAULT_WARMUP_STEPS, or all steps where these are fewer
    beta1: float = MISSING
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING
    clip_grad: float = MISSING


@dataclass
class RolloutConfig:
    workers: int = MISSING
    prompts_per_step: int = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    min_p: float = MISSING
    banned_token_ids: list[int] | None = None  # None: found when the configuration is composed
    reward_workers: int = MISSING
    reward_concurrency: int = MISSING
    over_sampling: float = MISSING
    surplus: Surplus = MISSING
    partial: Partial = MISSING
    max_aborts: int = MISSING
    mask_off_policy: bool = MISSING
    mask_truncated: bool = MISSING
    advantages: AdvantagesPlace = MISSING
    stop: list[str] = field(default_factory=list)

    @property
    def truncates(self) -> bool:
        """Whether samples are drawn from a part of the distribution, so that kept sets travel with them."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def banned(self) -> list[int]:
        """The tokens that no role counts, of a composed configuration."""
        assert self.banned_token_ids is not None, "config/compose.py has found them"
        return self.banned_token_ids

    @property
    def spare_prompts(self) -> int:
        """Prompts that are let in beyond those that a step needs."""
        return math.ceil(round((self.over_sampling - 1.0) * self.prompts_per_step, 6))


class FolderByTime(str):
    """A ``run.dir`` with the time in its name, as conf/ has it: each start has one of its own. A run that goes on finds
    its folder beside it, by the ``label`` at its end; a ``run.dir`` without the time is that of one run alone."""

    label: str = ""

    def labelled(self, label: str) -> FolderByTime:
        """The same with a label at its end."""
        folder = FolderByTime(f"{self}{label}")
        folder.label = label
        return folder


@dataclass
class RunSettings:
    steps: int = MISSING
    epochs: float | None = None
    dir: str = MISSING
    save_every: int = MISSING
    keep_last: int = MISSING
    keep_best: str | None = None  # a metric of evaluation, such as eval/exact
    patience: int = 0
    async_save: bool = MISSING
    export_hf: bool = MISSING
    panel: bool = MISSING
    start_timeout_s: float = MISSING
    stall_timeout_s: float = MISSING
    stop_timeout_s: float = MISSING
    max_restarts: int = MISSING
    max_recoveries: int = MISSING
    heartbeat_timeout_s: float = MISSING
    watch_after_s: float = MISSING
    watch_steps: int = MISSING
    serve: bool = MISSING


@dataclass
class EvalConfig:
    every: int = MISSING
    rows: int = MISSING
    samples: int = 1
    temperature: float = 0.0
    sets: dict[str, str | None] = field(default_factory=dict)  # name → file; None: the held-out rows of data


@dataclass
class RelaxConfig:
    """The root. Its keys are frozen by tests/config/test_root_keys.py."""

    name: str = MISSING
    seed: int = MISSING
    resume: str | None = None  # null | "auto" | a checkpoint folder
    plan: bool | str = MISSING  # false | true | "json": print the plan instead of running
    algo: Any = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    modality: ModalityConfig = field(default_factory=ModalityConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    placement: PlacementConfig = field(default_factory=PlacementConfig)
    mode: ModeConfig = field(default_factory=ModeConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    bus: BusConfig = field(default_factory=BusConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: Any = MISSING
    env: Any = MISSING
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunSettings = field(default_factory=RunSettings)
    eval: EvalConfig = field(default_factory=EvalConfig)

    @property
    def in_order(self) -> bool:
        """Whether prompts, evaluations and complete groups follow each other in the same order in every run."""
        return self.mode.max_staleness == 0 and self.rollout.workers == 1

    @property
    def repeatable(self) -> bool:
        """Whether the same seed gives the same run again, on a CPU to the bit: where no batch depends on timing."""
        timed = self.rollout.over_sampling > 1.0 or self.engine.deterministic is False
        return self.in_order and not timed
