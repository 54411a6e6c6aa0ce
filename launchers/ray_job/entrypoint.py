"""Defines what a Ray job executes: its command and environment variables, and the check that it has no secret."""

from __future__ import annotations

from relax_core.config.checks.launcher_keys import environment
from relax_core.config.saved import REDACTED, to_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.config.sections.launcher_schema import RayJobLauncherConfig
from relax_core.control.host.ray_session import ONE_THREAD

EXTRA_STOP_S = 30  # added to run.stop_timeout_s: after that Ray kills a job that does not stop


def launcher_of(config: RelaxConfig) -> RayJobLauncherConfig:
    """Returns ``config.launcher``, typed. The configuration has launcher=ray_job."""
    assert isinstance(config.launcher, RayJobLauncherConfig), "validated"
    return config.launcher


def entrypoint(launcher: RayJobLauncherConfig, *arguments: str) -> str:
    """Returns the shell command that executes the run on the cluster."""
    return " ".join([launcher.python, "-u", "-m", "launchers.saved_run", "--ray-address=auto", *arguments])


def variables(config: RelaxConfig) -> dict[str, str]:
    """Returns the environment variables of the job's processes.

    They give a stopped run the time that it needs for a checkpoint. Ray's default is 3 s.
    """
    launcher, stop_s = launcher_of(config), int(config.run.stop_timeout_s) + EXTRA_STOP_S
    return {**ONE_THREAD, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s), **environment(launcher.env)}


def refuse_secrets(config: RelaxConfig) -> None:
    """Raises ValueError if the configuration has a secret, because everybody who sees the job can read it."""
    if lines := [line.strip() for line in to_yaml(config).splitlines() if REDACTED in line]:
        raise ValueError(
            f"{lines[0]}: a job's configuration can be read in the cluster's dashboard. Set secrets as environment "
            "variables of the cluster's nodes, or as a Kubernetes secret."
        )
