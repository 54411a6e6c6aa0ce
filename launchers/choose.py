"""Hands a validated configuration to the launcher that it names."""

from __future__ import annotations

from relax_core.config.schema import LauncherKind, RelaxConfig


def launch(config: RelaxConfig) -> int:
    """Runs it where ``launcher`` says. Returns the exit code."""
    match config.launcher.name:
        case LauncherKind.local:
            from launchers import local

            return local.launch(config)
        case LauncherKind.slurm:
            from launchers import slurm

            return slurm.launch(config)
        case LauncherKind.ray_job:
            from launchers import ray_job

            return ray_job.launch(config)
