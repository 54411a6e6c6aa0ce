"""Writes a run as a RayJob manifest for KubeRay (launcher=ray_job launcher.dry_run=true)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import ray
import yaml

from launchers.ray_job.entrypoint import entrypoint, job_text, launcher_of, variables
from launchers.submitted import CONFIG_FILE
from relax_core.config.launcher_checks import VOLUME_PATH
from relax_core.config.schema import RayJobLauncherConfig, RelaxConfig
from relax_core.control.host.ray_session import RAY_CPUS

CONFIG_FOLDER = "/etc/relax"
SHARED_MEMORY = "/dev/shm"
NAME_LENGTH = 47  # KubeRay limits the name, because it appends a suffix


def manifest(config: RelaxConfig, overrides: Sequence[str]) -> str:
    """Returns YAML with a ConfigMap for the run's configuration and a RayJob that executes the run (ray.io/v1).

    KubeRay creates the cluster's token as a separate secret (authOptions), so the manifest contains no secret. Raises
    ValueError if the configuration contains a secret.
    """
    launcher = launcher_of(config)
    name = _name(config.name)
    metadata = {"name": name, "labels": {"app.kubernetes.io/name": "relax"}}
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata,
        "data": {CONFIG_FILE: job_text(config, overrides)},
    }
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": metadata,
        "spec": {
            "entrypoint": entrypoint(launcher, f"{CONFIG_FOLDER}/{CONFIG_FILE}"),
            "runtimeEnvYAML": yaml.safe_dump({"env_vars": variables(config)}),
            "shutdownAfterJobFinishes": True,
            "backoffLimit": 0,  # no retries: the run recovers by itself, and a second job would use the same folder
            "rayClusterSpec": _cluster(config, launcher, name),
        },
    }
    return "---\n".join(yaml.safe_dump(part, sort_keys=False) for part in (config_map, job))


def _cluster(config: RelaxConfig, launcher: RayJobLauncherConfig, name: str) -> dict[str, Any]:
    start = {"num-cpus": str(RAY_CPUS), "object-store-memory": str(launcher.object_store_mb << 20)}
    cluster: dict[str, Any] = {
        "rayVersion": ray.__version__,
        "authOptions": {"mode": "token"},
        "headGroupSpec": {
            "rayStartParams": start,
            "template": {"spec": _pod(config, launcher, name, "ray-head")},
        },
    }
    if launcher.nodes > 1:
        workers = launcher.nodes - 1
        cluster["workerGroupSpecs"] = [
            {
                "groupName": "nodes",
                "replicas": workers,
                "minReplicas": workers,
                "maxReplicas": workers,
                "rayStartParams": start,
                "template": {"spec": _pod(config, launcher, name, "ray-worker")},
            }
        ]
    return cluster


def _pod(config: RelaxConfig, launcher: RayJobLauncherConfig, name: str, container: str) -> dict[str, Any]:
    memory = f"{round(launcher.memory_gb * 1024)}Mi"
    resources = {"cpu": str(launcher.cpus_per_node), "memory": memory}
    if gpus := config.placement.gpus_per_node:
        resources["nvidia.com/gpu"] = str(gpus)
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": name}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": memory}},
    ]
    mounts = [{"name": "config", "mountPath": CONFIG_FOLDER}, {"name": "shm", "mountPath": SHARED_MEMORY}]
    if launcher.volume_claim is not None:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": launcher.volume_claim}})
        mounts.append({"name": "runs", "mountPath": VOLUME_PATH})
    return {
        "containers": [
            {
                "name": container,
                "image": launcher.image,
                "resources": {"requests": resources, "limits": resources},
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }


def _name(name: str) -> str:
    """Returns a name that Kubernetes accepts: lower case letters, digits and dashes."""
    return re.sub(r"[^a-z0-9]+", "-", f"relax-{name}".lower())[:NAME_LENGTH].strip("-")
