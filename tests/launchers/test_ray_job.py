"""Tests the job that a Ray cluster receives. tests/integration/test_ray_job.py submits a job to a cluster."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launchers.ray_job.entrypoint import job_text, variables
from launchers.ray_job.job_client import submit
from launchers.ray_job.kuberay_manifest import manifest
from launchers.submitted import read_submitted
from relax_core.__main__ import main
from relax_core.config.compose import load_config
from relax_core.config.schema import RayJobLauncherConfig

POD_SPEC = {"containers", "volumes"}
# The fields of KubeRay's RayJob (ray.io/v1) that the manifest uses, from KubeRay's API reference.
RAY_JOB = {"entrypoint", "runtimeEnvYAML", "shutdownAfterJobFinishes", "backoffLimit", "rayClusterSpec"}
RAY_CLUSTER = {"rayVersion", "authOptions", "headGroupSpec", "workerGroupSpecs"}
WORKER_GROUP = {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams", "template"}
FOR_KUBERAY = (
    "launcher=ray_job",
    "launcher.dry_run=true",
    "launcher.image=registry/relax:1",
    "launcher.volume_claim=runs",
    "run.dir=/data/runs/one",
    "model=qwen3",
    "model.path=/data/models/nowhere",  # only the cluster has this folder
)


def test_a_manifest_is_a_whole_ray_job() -> None:
    config = load_config([*FOR_KUBERAY, "launcher.nodes=3", "placement.gpus_per_node=8", "name=My_Run"])
    config_map, job = yaml.safe_load_all(manifest(config, ["seed=1"]))
    assert (config_map["kind"], job["kind"], job["apiVersion"]) == ("ConfigMap", "RayJob", "ray.io/v1")
    assert config_map["metadata"]["name"] == job["metadata"]["name"] == "relax-my-run"
    assert read_submitted(config_map["data"]["submitted.yaml"]) == (config, ["seed=1"])
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert set(spec) <= RAY_JOB and set(cluster) == RAY_CLUSTER
    assert spec["entrypoint"].endswith("-m launchers.saved_run --ray-address=auto /etc/relax/submitted.yaml")
    assert (
        int(yaml.safe_load(spec["runtimeEnvYAML"])["env_vars"]["RAY_JOB_STOP_WAIT_TIME_S"]) > config.run.stop_timeout_s
    )
    assert cluster["authOptions"] == {"mode": "token"}
    (workers,) = cluster["workerGroupSpecs"]
    assert set(workers) == WORKER_GROUP and workers["replicas"] == 2
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        assert set(pod) == POD_SPEC
        (container,) = pod["containers"]
        assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


def test_one_node_has_no_workers() -> None:
    _, job = yaml.safe_load_all(manifest(load_config(list(FOR_KUBERAY)), []))
    assert "workerGroupSpecs" not in job["spec"]["rayClusterSpec"]


def test_the_command_prints_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(FOR_KUBERAY) == 0
    assert [part["kind"] for part in yaml.safe_load_all(capsys.readouterr().out)] == ["ConfigMap", "RayJob"]


def test_a_secret_is_not_sent() -> None:
    config = load_config(["launcher=ray_job", 'launcher.env=["INDEX=https://me:s3cret@host/x"]'])
    with pytest.raises(ValueError, match="can be read in the cluster's dashboard") as caught:
        job_text(config, [])
    assert "s3cret" not in str(caught.value)


def test_variables_of_the_job() -> None:
    given = variables(load_config(["launcher=ray_job", 'launcher.env=["A=b=c"]', "run.stall_timeout_s=900"]))
    assert given["A"] == "b=c" and given["RAY_JOB_STOP_WAIT_TIME_S"] == "120" and given["OMP_NUM_THREADS"] == "1"


def test_an_unreachable_cluster_is_reported_in_one_line(tmp_path: Path) -> None:
    config = load_config(["launcher=ray_job", "launcher.address=http://127.0.0.1:9", f"run.dir={tmp_path}/run"])
    assert isinstance(config.launcher, RayJobLauncherConfig)
    with pytest.raises(ConnectionError, match=r"127\.0\.0\.1:9"):
        submit(config, [])
    assert list(tmp_path.iterdir()) == []
