"""The program that starts a Ray worker executes the worker, or Ray's own program if there is something to prepare."""

from __future__ import annotations

import os

import pytest
from ray._private import workers

from relax_core.control.host.worker_start import worker_command

WORKER = os.path.join(workers.__path__[0], "default_worker.py")
PYTHON, EMPTY = "--language=PYTHON", "--serialized-runtime-env-context={}"


@pytest.mark.parametrize("options", [(PYTHON,), (PYTHON, EMPTY), (EMPTY, PYTHON)])
def test_a_worker_without_an_environment_is_executed_at_once(options: tuple[str, ...]) -> None:
    assert worker_command([WORKER, "--temp-dir=/a b", *options]) == [WORKER, "--temp-dir=/a b"]


@pytest.mark.parametrize(
    "options",
    [
        (PYTHON, '--serialized-runtime-env-context={"env_vars": {"A": "1"}}'),
        ("--language=JAVA",),
        (EMPTY, "--language=JAVA"),
        (PYTHON, "--serialized-runtime-env-context", "{}"),
        (),
    ],
)
def test_any_other_worker_is_prepared_by_ray(options: tuple[str, ...]) -> None:
    command = worker_command([WORKER, *options])
    assert os.path.basename(command[0]) == "setup_worker.py" and os.path.isfile(command[0])
    assert command[1:] == [WORKER, *options]
