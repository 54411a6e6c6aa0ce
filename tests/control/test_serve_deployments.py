"""The roles' Serve deployments. Without run.serve there is none, and Serve does not start."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import pytest
import ray

from relax_core.control.recoveries import Recoveries
from relax_core.control.serve_deployments import ServeDeployments
from relax_core.control.serve_watch import CONTROLLER_ACTOR, NAMESPACE
from relax_core.roles.process_placement import roles_of
from relax_core.roles.role_context import RunContext
from tests.roles.run_context import context_in

DEADLINE_S = 120.0


@ray.remote(num_cpus=0)
class Named:
    """A worker whose status is its name."""

    def __init__(self, name: str) -> None:
        self._name = name

    def status(self) -> str:
        return self._name


def deployments_of(context: RunContext) -> ServeDeployments:
    def ray_lost(cause: str) -> NoReturn:
        raise AssertionError(cause)

    return ServeDeployments(
        context, recoveries=Recoveries(context.run_dir / "recoveries", report=print), ray_lost=ray_lost
    )


def test_serve_starts_only_where_the_run_asks_for_it(ray_session: str, tmp_path: Path) -> None:
    from ray import serve

    plain = deployments_of(context_in(tmp_path))
    plain.follow("test-0")
    plain.check(step=0)
    plain.close(timeout_s=DEADLINE_S)
    assert plain.error() is None
    with pytest.raises(ValueError, match=CONTROLLER_ACTOR):
        ray.get_actor(CONTROLLER_ACTOR, namespace=NAMESPACE)

    context = context_in(tmp_path, "run.serve=true")
    roles = roles_of(context.config)
    workers = [Named.options(name=f"{role}-0", namespace="test-0").remote(f"{role}-0") for role in roles]  # type: ignore[attr-defined]
    asked = deployments_of(context)
    try:
        asked.follow("test-0")
        asked.close(timeout_s=DEADLINE_S)  # this waits for the deployment, which ends with Ray
        for role in roles:
            deployment = serve.get_app_handle(f"test-{role}")
            assert deployment.status.remote().result(timeout_s=DEADLINE_S) == [f"{role}-0"]
    finally:
        serve.shutdown()
        for worker in workers:
            ray.kill(worker)
