"""Defines the type of every configuration key; conf/*.yaml has the default values and the documentation.

The sections `algo`, `reward` and `env` have the type of the plug-in's `config` dataclass (config/plugin_types.py), so a
new plug-in file defines its own settings. Choices are enums, because OmegaConf 2.3 does not support Literal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

from omegaconf import MISSING

from relax_core.config.choices import (
    ForwardRanks,
    GpuName,
    LastAssistant,
    LauncherKind,
    MediaPlace,
    ModeName,
    OnStale,
    Overlong,
    Partial,
    Recompute,
    Schedule,
    StatesPlace,
    Surplus,
    WeightTransportName,
)
from relax_core.contracts.env import TurnsConfig
from relax_core.contracts.media import MediaKind


@dataclass
class LoraConfig:
    """Holds the keys of `model.lora`."""

    rank: int = MISSING
    alpha: float = MISSING
    targets: list[str] = MISSING
    rslora: bool = MISSING


@dataclass
class ModelConfig:
    """Holds the keys of `model`."""

    name: str = MISSING
    family: str | None = MISSING  # None means the model_type of config.json
    path: str | None = None  # a Hugging Face folder
    builtin: str | None = None  # the name of a tiny model that Relax generates
    task: str | None = None  # the generated task of the builtin model's warm start
    shape: str | None = None  # without path: the name of a published model, for the dimensions of a plan
    dtype: str = MISSING  # float32 | bfloat16 | auto; auto is replaced before a run starts
    moe_aux_loss_coef: float = 0.0  # only for mixture-of-experts models
    freeze: list[str] = field(default_factory=list)  # frozen parts, a subset of choices.MODEL_PARTS
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class MediaTask:
    """Holds the ``kinds`` of media of a generated task.

    In a control task the media of the ``exchanged`` kinds come from random other rows.
    """

    kinds: tuple[MediaKind, ...]
    exchanged: tuple[MediaKind, ...] = ()


_VISION: tuple[MediaKind, ...] = ("image", "video")
_VISION_AND_AUDIO: tuple[MediaKind, ...] = (*_VISION, "audio")
_IMAGE_AND_AUDIO: tuple[MediaKind, ...] = ("image", "audio")
SEE, FOUR_MODALITIES, TONE_OF_PICTURE = "see", "four_modalities", "tone_of_picture"
MEDIA_TASKS = {
    SEE: MediaTask(kinds=_VISION),
    f"{SEE}_exchanged": MediaTask(kinds=_VISION, exchanged=_VISION),
    FOUR_MODALITIES: MediaTask(kinds=_VISION_AND_AUDIO),
    **{
        f"{FOUR_MODALITIES}_{kind}_exchanged": MediaTask(kinds=_VISION_AND_AUDIO, exchanged=(kind,))
        for kind in _VISION_AND_AUDIO
    },
    f"{FOUR_MODALITIES}_exchanged": MediaTask(kinds=_VISION_AND_AUDIO, exchanged=_VISION_AND_AUDIO),
    TONE_OF_PICTURE: MediaTask(kinds=_IMAGE_AND_AUDIO),
    **{
        f"{TONE_OF_PICTURE}_{kind}_exchanged": MediaTask(kinds=_IMAGE_AND_AUDIO, exchanged=(kind,))
        for kind in _IMAGE_AND_AUDIO
    },
}


@dataclass
class ModalityConfig:
    """Holds the keys of `modality`."""

    name: str = MISSING
    image_tokens: list[int] = MISSING
    video_fps: float = MISSING
    video_frames: list[int] = MISSING
    frame_tokens: int = MISSING
    audio_seconds: list[float] = MISSING
    audio_in_video: bool = MISSING
    workers: int = MISSING


@dataclass
class MediaKeys:
    """Holds the keys of `data.media_keys`: the columns with images, videos and audio."""

    image: str | None = None
    video: str | None = None
    audio: str | None = None

    @property
    def columns(self) -> dict[MediaKind, str]:
        """Returns the column of each kind of media. Leaves out kinds without a column."""
        found: dict[MediaKind, str | None] = {"image": self.image, "video": self.video, "audio": self.audio}
        return {kind: column for kind, column in found.items() if column is not None}


@dataclass
class ForwardLayout:
    """Holds the parallel sizes of a role that only computes log-probs; fields are as in `ParallelConfig`."""

    dp: int = MISSING
    tp: int = MISSING
    pp: int = MISSING
    ep: int = MISSING

    @property
    def cp(self) -> int:
        """Returns 1, because these ranks do not use context parallelism."""
        return 1

    @property
    def etp(self) -> int:
        """Returns 1, because these ranks do not split single experts."""
        return 1


FORWARD_SIZES = tuple(size.name for size in fields(ForwardLayout))


@dataclass
class ParallelConfig:
    """Holds the keys of `parallel`."""

    dp: int = MISSING
    tp: int = MISSING
    pp: int = MISSING
    vpp: int = MISSING  # chunks of layers per pipeline rank
    cp: int = MISSING
    ep: int = MISSING
    etp: int = MISSING
    # layers of the first pipeline stage; None: the same number as in the other stages
    first_stage_layers: int | None = None
    sequence_parallel: bool = MISSING
    shard_media: bool = False  # distributes the media items of a micro-batch over the ranks of the first stage
    recompute: Recompute = MISSING
    distributed_optimizer: bool = MISSING
    overlap: bool = MISSING
    micro_batch_tokens: int = MISSING  # maximum rows of a micro-batch, including the towers' work, converted to rows
    micro_batch_patches: int = MISSING  # maximum number of patches of images and videos in a micro-batch
    forward: ForwardLayout = field(default_factory=ForwardLayout)  # layout of actor_fwd and reference


@dataclass
class PlacementConfig:
    """Holds the keys of `placement`."""

    nodes: int = MISSING
    gpus_per_node: int = MISSING  # 0 means that all processes run on CPU cores
    gpu: GpuName | None = None  # the model of the GPUs; None means that it is unknown, so no time is estimated
    gpu_memory_gib: float | None = None  # None means the memory of `gpu`
    forward: ForwardRanks = ForwardRanks.separate  # the processes that compute the log-probs of actor_fwd and reference
    roles: dict[str, int] = field(default_factory=dict)  # role → GPUs; empty means that all roles share all GPUs


@dataclass
class ModeConfig:
    """Holds the keys of `mode`."""

    name: ModeName = MISSING
    max_staleness: int = MISSING
    on_stale: OnStale = MISSING

    @property
    def versions_in_flight(self) -> int:
        """Returns the maximum number of weight versions that sampled the groups in flight."""
        return self.max_staleness + 1

    @property
    def max_lag(self) -> int | None:
        """Returns the maximum staleness of an episode in weight versions, or None if stale tokens are masked."""
        return self.max_staleness if self.on_stale is OnStale.drop else None


@dataclass
class ElasticConfig:
    """Holds the keys of `engine.elastic`."""

    max_count: int = MISSING
    allowed_hosts: list[str] = field(default_factory=list)


@dataclass
class AutoscalerConfig:
    """Holds the keys of `engine.autoscaler`."""

    enabled: bool = MISSING
    cooldown_s: float = MISSING


@dataclass
class EngineConfig:
    """Holds the keys of `engine`."""

    name: str = MISSING
    dtype: str | None = None  # None means model.dtype
    count: int = MISSING
    tp: int = MISSING  # number of GPUs of one engine
    port: int = MISSING
    max_running_samples: int = MISSING
    max_total_tokens: int = MISSING
    context_length: int | None = MISSING  # None until plan/context_length.py derives it, before the start
    threads: int = MISSING  # 0 until plan/threads.py derives it, before the start
    start_timeout_s: float = MISSING
    weight_transport: WeightTransportName = MISSING
    elastic: ElasticConfig = field(default_factory=ElasticConfig)
    autoscaler: AutoscalerConfig = field(default_factory=AutoscalerConfig)
    # Only some engines read the following keys (`EngineSpec.keys`); with other engines the keys keep these values.
    python: str | None = None
    urls: list[str] = field(default_factory=list)
    token_file: str | None = None
    mem_fraction: float | None = None
    deterministic: bool | None = None
    flags: dict[str, Any] = field(default_factory=dict)
    # Only engine=embedded reads this key. It is None until plan/context_length.py derives it before the start.
    prefix_cache_tokens: int | None = None

    @property
    def context_tokens(self) -> int:
        """Returns the maximum number of prompt and response tokens of one sample; needs a derived context_length."""
        assert self.context_length is not None, "preflight derives it"
        return self.context_length

    @property
    def cpu_threads(self) -> int:
        """Returns the number of CPU threads per engine and per trainer rank; 1 until `threads` is derived."""
        return max(1, self.threads)


@dataclass
class BusConfig:
    """Holds the keys of `bus`."""

    name: str = MISSING


@dataclass
class DataConfig:
    """Holds the keys of `data`."""

    name: str = MISSING
    path: str | None = None
    paths: Any = None  # in place of path: a list of files, or a mapping from files to weights
    eval_path: str | None = None
    prompt_key: str = MISSING
    answer_key: str = MISSING
    task: str | None = None  # a generated task in place of a file
    size: int = MISSING  # rows of a generated task
    eval_size: int = MISSING
    shuffle: bool = MISSING
    max_bad_rows: float = 0.05
    overlong: Overlong = Overlong.drop
    last_assistant: LastAssistant | None = None  # None rejects a prompt that ends with an assistant message
    template_date: str | None = None  # None until the run's first start; the start sets the UTC date
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    mix: Any = None  # a mapping from modalities to their shares of the trained prompts
    media_keys: MediaKeys = field(default_factory=MediaKeys)
    media_place: MediaPlace | None = None  # None rejects rows with media but without a placeholder
    media_root: str | None = None
    # settings of a plug-in source; the plug-in's dataclass defines the types
    config: dict[str, Any] = field(default_factory=dict)


DEFAULT_WARMUP_STEPS = 10


@dataclass
class OptimizerConfig:
    """Holds the keys of `optimizer`."""

    lr: float = MISSING
    critic_lr: float | None = None  # learning rate of the critic; None means lr
    tower_lr: float | None = None  # learning rate of the vision tower; None means lr
    min_lr_ratio: float = MISSING
    schedule: Schedule = MISSING
    warmup_steps: int | None = None  # None means DEFAULT_WARMUP_STEPS, or all steps if there are fewer
    beta2: float = MISSING
    eps: float = MISSING
    weight_decay: float = MISSING
    clip_grad: float = MISSING
    states: StatesPlace = MISSING


@dataclass
class RolloutConfig:
    """Holds the keys of `rollout`."""

    workers: int = MISSING
    prompts_per_step: int = MISSING
    max_new_tokens: int = MISSING
    temperature: float = MISSING
    top_p: float = MISSING
    top_k: int = MISSING
    min_p: float = MISSING
    banned_token_ids: list[int] | None = None  # None until the configuration is composed
    reward_workers: int = MISSING
    over_sampling: float = MISSING
    surplus: Surplus = MISSING
    partial: Partial = MISSING
    quorum: float = MISSING
    lockstep: bool = MISSING
    mask_off_policy: bool = MISSING
    mask_truncated: bool = MISSING
    stop: list[str] = field(default_factory=list)

    @property
    def truncates(self) -> bool:
        """Returns whether sampling truncates the distribution; samples then list the remaining tokens (kept sets)."""
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def banned(self) -> list[int]:
        """Returns the token ids that all roles exclude from sampling; needs a composed configuration."""
        assert self.banned_token_ids is not None, "config/compose.py sets rollout.banned_token_ids"
        return self.banned_token_ids

    @property
    def spare_prompts(self) -> int:
        """Returns how many prompts over-sampling adds to the prompts that a step needs."""
        return math.ceil(round((self.over_sampling - 1.0) * self.prompts_per_step, 6))


class DtypeByMachine(str):
    """Marks a ``model.dtype`` that ``auto`` chose for this machine.

    A resumed run keeps the dtype of its checkpoint.

    The launcher converts the value to plain text before a run starts, because no encoder supports this class.
    """


class FolderByTime(str):
    """Marks a ``run.dir`` with the time in its name (the default), which makes each start use a new folder.

    A resumed run finds its folder among the sibling folders by the ``label`` at the end of the name. A ``run.dir``
    without the time belongs to a single run.
    """

    label: str = ""

    def labelled(self, label: str) -> FolderByTime:
        """Appends a label to the folder name."""
        folder = FolderByTime(f"{self}{label}")
        folder.label = label
        return folder


@dataclass
class RunSettings:
    """Holds the keys of `run`."""

    steps: int = MISSING
    epochs: float | None = None
    # keys with an unusual value that the user intends (ranges.py, USUAL)
    confirm: list[str] = field(default_factory=list)
    dir: str = MISSING
    save_every: int = MISSING
    keep_last: int = MISSING
    keep_best: str | None = None  # a metric of the evaluation, such as eval/exact
    patience: int = 0
    export_hf: bool = MISSING
    panel: bool = MISSING
    start_timeout_s: float = MISSING
    stall_timeout_s: float = MISSING
    max_restarts: int = MISSING
    max_recoveries: int = MISSING
    heartbeat_timeout_s: float = MISSING
    serve: bool = MISSING

    @property
    def stop_timeout_s(self) -> float:
        """Returns the seconds that a service has to end at a stop before it is killed."""
        return max(60.0, self.stall_timeout_s / 10)


@dataclass
class EvalConfig:
    """Holds the keys of `eval`."""

    every: int = MISSING
    rows: int = MISSING
    samples: int = 1
    temperature: float = 0.0
    # name → file; a None file means the held-out rows of data
    sets: dict[str, str | None] = field(default_factory=dict)


@dataclass
class GatewayConfig:
    """Holds the keys of `gateway`."""

    name: str = MISSING
    host: str = MISSING
    port: int = MISSING
    allowed_hosts: list[str] = field(default_factory=list)


HISTORIES = ("continue", "template")


@dataclass
class AgentConfig:
    """Holds the keys of `agent`."""

    command: str | None = None  # None: external agents open sessions
    cwd: str | None = None  # None: the working folder at the start of the run
    env: dict[str, str] = field(default_factory=dict, repr=False)
    python: str | None = None  # None: the Python of the run
    workers: int = MISSING
    timeout_s: float = MISSING
    history: str = MISSING


@dataclass
class EndpointConfig:
    """Holds the keys of `endpoint`."""

    host: str = MISSING
    port: int = MISSING


# Events for `notify.events`. "restarts": more than three restarts in place (tier 1) per hour. "recovery": all services
# restart from a checkpoint (tier 2).
EVENTS = (
    *("started", "finished", "stopped", "failed", "restarts", "recovery", "stalled"),
    *("engine_lost", "order_failed", "disk_low", "straggler", "rule"),
)


@dataclass
class NotifyConfig:
    """Holds the keys of `notify`."""

    urls_file: str | None = None
    events: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)


ALL_SAMPLES = "all"


@dataclass
class TrackerConfig:
    """Holds the keys of `tracker`."""

    tensorboard: bool = MISSING
    samples: str = ALL_SAMPLES  # "all", or the number of groups of a train step
    sinks: Any = None  # plug-ins: a list of names and paths, or a mapping from them to configurations


def kept_groups(tracker: TrackerConfig, *, groups_per_step: int) -> int:
    """Returns how many of a train step's ``groups_per_step`` groups the tracker keeps.

    Raises ValueError for a value that is neither "all" nor a number of groups.
    """
    if tracker.samples == ALL_SAMPLES:
        return groups_per_step
    if not tracker.samples.isdecimal():
        raise ValueError(
            f"tracker.samples={tracker.samples}: give all, or a number of groups per train step; 0 keeps none."
        )
    return min(int(tracker.samples), groups_per_step)


@dataclass
class LauncherConfig:
    """Holds the keys of launcher=local; all launchers have these keys."""

    name: LauncherKind = MISSING
    ray_address: str | None = None  # only for launcher=local; other launchers set this key themselves
    nodes: int = MISSING
    object_store_mb: int = MISSING


@dataclass
class SlurmLauncherConfig(LauncherConfig):
    """Holds the keys of launcher=slurm."""

    cpus_per_node: int = MISSING
    memory_gb: float | None = None
    time_limit_min: int = MISSING
    checkpoint_s: int = MISSING
    max_requeues: int = MISSING
    sbatch: list[str] = field(default_factory=list)
    srun: list[str] = field(default_factory=list)
    setup: list[str] = field(default_factory=list)
    python: str | None = None
    follow: bool = MISSING
    dry_run: bool = MISSING


@dataclass
class RayJobLauncherConfig(LauncherConfig):
    """Holds the keys of launcher=ray_job."""

    address: str = MISSING
    token_file: str | None = None
    python: str = MISSING
    env: list[str] = field(default_factory=list, repr=False)
    follow: bool = MISSING
    dry_run: bool = MISSING
    image: str | None = None
    cpus_per_node: int = MISSING
    memory_gb: float = MISSING
    volume_claim: str | None = None


LAUNCHERS: dict[str, type[LauncherConfig]] = {
    "local": LauncherConfig,
    "slurm": SlurmLauncherConfig,
    "ray_job": RayJobLauncherConfig,
}


@dataclass
class RelaxConfig:
    """Holds the whole configuration; tests/config/test_root_keys.py freezes the root keys."""

    name: str = MISSING
    seed: int = MISSING
    resume: str | None = None  # null | "auto" | a checkpoint folder
    plan: bool | str = MISSING  # one of `PLANS` in validate.py: print the plan, or rehearse, instead of running
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
    agent: AgentConfig = field(default_factory=AgentConfig)
    endpoint: EndpointConfig = field(default_factory=EndpointConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)
    launcher: LauncherConfig = field(default_factory=LauncherConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    run: RunSettings = field(default_factory=RunSettings)
    eval: EvalConfig = field(default_factory=EvalConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    notify: NotifyConfig = field(default_factory=NotifyConfig)

    @property
    def in_order(self) -> bool:
        """Returns whether prompts, evaluations and complete groups have the same order in each run."""
        return self.mode.max_staleness == 0 and self.rollout.workers == 1

    @property
    def repeatable(self) -> bool:
        """Returns whether the same seed repeats the run (on CPUs bit by bit), because no batch depends on timing."""
        rollout = self.rollout
        timed = rollout.over_sampling > 1.0 or rollout.quorum < 1.0 or self.engine.deterministic is False
        turns = isinstance(self.env, TurnsConfig) and not rollout.lockstep
        return self.in_order and not timed and not turns
