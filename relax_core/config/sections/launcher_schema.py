"""Defines the keys of `launcher`, which differ from launcher to launcher."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from relax_core.config.choices import LauncherKind


@dataclass
class LauncherConfig:
    """Holds the keys of launcher=local, and those that a run reads with every launcher."""

    name: LauncherKind = MISSING
    ray_address: str | None = None  # only for launcher=local; the other launchers set it themselves
    nodes: int = MISSING
    ray_logical_cpus: int = MISSING
    object_store_mb: int = MISSING


@dataclass
class SlurmLauncherConfig(LauncherConfig):
    """Holds the keys of launcher=slurm."""

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
    """Holds the keys of launcher=ray_job."""

    address: str = MISSING
    token_file: str | None = None
    working_dir: str | None = None
    python: str = MISSING
    env: list[str] = field(default_factory=list, repr=False)
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
