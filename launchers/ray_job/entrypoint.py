"""Defines the command, the environment variables and the configuration (without secrets) of a Ray job."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import replace

from launchers.submitted import OVERRIDES
from relax_core.config.launcher_checks import environment
from relax_core.config.redaction import REDACTED, secret_leaves, without_address_secrets
from relax_core.config.saved_config import plain, to_yaml
from relax_core.config.schema import RayJobLauncherConfig, RelaxConfig
from relax_core.control.host.ray_session import ONE_THREAD

EXTRA_STOP_S = 30  # added to run.stop_timeout_s; Ray then kills a job that has not stopped


def launcher_of(config: RelaxConfig) -> RayJobLauncherConfig:
    """Returns ``config.launcher`` with its type for launcher=ray_job."""
    assert isinstance(config.launcher, RayJobLauncherConfig), "validated"
    return config.launcher


def entrypoint(launcher: RayJobLauncherConfig, *arguments: str) -> str:
    """Returns the shell command that executes the run on the cluster, with each argument quoted."""
    python = shlex.split(launcher.python)
    return shlex.join([*python, "-u", "-m", "launchers.saved_run", "--ray-address=auto", *arguments])


def variables(config: RelaxConfig) -> dict[str, str]:
    """Returns the environment variables of the job's processes.

    They give a stopped run enough time for a checkpoint. Ray's default is 3 s.
    """
    launcher, stop_s = launcher_of(config), int(config.run.stop_timeout_s) + EXTRA_STOP_S
    return {**ONE_THREAD, "RAY_JOB_STOP_WAIT_TIME_S": str(stop_s), **environment(launcher.env)}


def job_text(config: RelaxConfig, overrides: Sequence[str]) -> str:
    """Returns the text of submitted.yaml for a job.

    All users with access to the job can read this text. Secrets that are references stay references; the job resolves
    them on the cluster. launcher.env is left out, because the job's processes already have these variables. Raises
    ValueError for a secret that is not a reference.
    """
    sent = replace(config, launcher=replace(launcher_of(config), env=[]))
    addresses = [word for word in launcher_of(config).env if without_address_secrets(word) != word]
    if secrets := [*secret_leaves(plain(sent)), *("launcher.env" for _ in addresses)]:
        raise ValueError(
            f"{secrets[0]}={REDACTED}: a job's configuration can be read in the cluster's dashboard. Set the secret as "
            "an environment variable of the cluster's nodes, or as a Kubernetes secret, and refer to it: "
            f"{secrets[0]}='${{oc.env:NAME}}'."
        )
    return f"{OVERRIDES}{json.dumps(list(overrides))}\n{to_yaml(sent)}"
