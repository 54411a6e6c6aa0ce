"""Tests that the Serve deployments of roles return the status of their workers."""

from __future__ import annotations

from pathlib import Path

import ray

from relax_core.control.serve_deployments import ServeDeployments
from relax_core.roles.process_placement import roles_of
from tests.roles.run_context import context_in

DEADLINE_S = 120.0


@ray.remote(num_cpus=0)
class Named:
    """A worker that returns its name as status."""

    def __init__(self, name: str) -> None:
        self._name = name

    def status(self) -> str:
        return self._name


def test_each_role_has_a_deployment_that_tells_its_status(ray_session: str, tmp_path: Path) -> None:
    from ray import serve

    context = context_in(tmp_path, "run.serve=true")
    roles = roles_of(context.config)
    workers = [Named.options(name=f"{role}-0", namespace="test-0").remote(f"{role}-0") for role in roles]  # type: ignore[attr-defined]
    deployments = ServeDeployments(context)
    try:
        deployments.follow("test-0")
        deployments.close(timeout_s=DEADLINE_S)  # this waits for the deployment, which ends with Ray
        assert deployments.look() is None
        for role in roles:
            deployment = serve.get_app_handle(f"test-{role}")
            assert deployment.status.remote().result(timeout_s=DEADLINE_S) == [f"{role}-0"]
    finally:
        serve.shutdown()
        for worker in workers:
            ray.kill(worker)
