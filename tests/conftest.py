"""Common fixtures of all tests: one small local Ray for the session, and a folder for temporary files."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

from relax_core.control.host.ray_session import new_token_file
from tests.conf_file_cache import remember_conf_files
from tests.scratch import Scratch

if TYPE_CHECKING:
    from xdist.remote import Producer

    from tests.workers import GroupScheduling

SCRATCH = pytest.StashKey[Scratch]()

# Like `make test`: one thread, for reproducible bits and shared cores. It is set here because other conftests import
# torch.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Ray reads this variable on import. The conftest of a folder on pytest's command line imports Ray before
# `pytest_configure`.
os.environ["RAY_AUTH_MODE"] = "token"

# A shell ignores SIGINT in background processes, and nohup ignores SIGHUP; children would inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Each session uses the same examples, on machines of any speed. So a failure comes from a change of the code.
# `--hypothesis-profile=default` draws new examples.
settings.register_profile(
    "relax", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.load_profile("relax")


def hands_tests_to_workers(config: pytest.Config) -> bool:
    """Returns whether this is the controller of `pytest -n 2`. It runs no test; each worker has a separate scratch."""
    return not hasattr(config, "workerinput") and config.getoption("dist", "no") != "no"


def pytest_configure(config: pytest.Config) -> None:
    """Makes the session's folder, with the token of its Ray, before test files are imported."""
    if hands_tests_to_workers(config):
        return
    scratch = config.stash[SCRATCH] = Scratch()
    scratch.as_tmpdir()
    (scratch.folder / "r").mkdir()
    os.environ["RAY_AUTH_TOKEN_PATH"] = str(new_token_file(scratch.folder / "r" / "token"))
    remember_conf_files()


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hands_tests_to_workers(config):
        config.stash[SCRATCH].close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> GroupScheduling:
    """Divides the tests between workers as `tests/workers.py` defines, for every ``--dist``."""
    from tests.workers import GroupScheduling

    config.option.loadscopereorder = False  # `pytest_collection_modifyitems` sets the order
    return GroupScheduling(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sorts the tests of a worker by the order of their groups."""
    if hasattr(config, "workerinput"):
        from tests.workers import place_of

        items.sort(key=lambda item: place_of(item.nodeid))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item) -> Generator[None]:
    yield
    item.config.stash[SCRATCH].note(item.nodeid)


@pytest.fixture(scope="session", autouse=True)
def nothing_is_left_behind(pytestconfig: pytest.Config) -> Iterator[None]:
    """Checks that no folder, shared memory or process of a test outlives the session. This teardown runs last."""
    yield
    left = pytestconfig.stash[SCRATCH].left()
    assert not left, "tests left behind:\n" + "\n".join(left)


@pytest.fixture(scope="session", autouse=True)
def no_shared_process_is_left(nothing_is_left_behind: None) -> Iterator[None]:
    """Ends the server process of `tests/train/rank_server.py`, and idle spare engines."""
    yield
    if "tests.train.rank_server" in sys.modules:
        from tests.train.rank_server import SERVER

        SERVER.close()
    if "tests.contracts.engine.spare_engines" in sys.modules:
        from tests.contracts.engine.spare_engines import SPARE_ENGINES

        SPARE_ENGINES.close()


@pytest.fixture(scope="session", autouse=True)
def short_reward_checks() -> None:
    """Limits the check of a reward before a start to its first rows, because hundreds of tests run this check."""
    from relax_core.plan import reward_check

    reward_check.LIMIT_S = 0.0


@pytest.fixture(scope="session")
def ray_session(pytestconfig: pytest.Config) -> Iterator[str]:
    """Starts Ray on this machine like a run, with token authentication and a fork server. Yields Ray's address."""
    import ray
    from ray._private import node

    from relax_core.control.host.own_ray_node import OwnRayNode
    from relax_core.control.host.ray_session import FORK_SERVER, ForkServer, can_use_own_node
    from relax_core.control.local_run import PRELOADED

    folder = pytestconfig.stash[SCRATCH].folder / "r"
    fork_server = None
    with pytest.MonkeyPatch.context() as patch:  # the raylet keeps the environment for its workers
        if can_use_own_node():
            patch.setattr(node, "Node", OwnRayNode)
            patch.setenv(FORK_SERVER, str(folder / "fork-server"))
            fork_server = ForkServer(folder / "fork-server", PRELOADED, max_restarts=0)
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=200 * 1024 * 1024,
            _temp_dir=str(folder),
            _node_ip_address="127.0.0.1",
        )
    yield ray.get_runtime_context().gcs_address
    ray.shutdown()
    if fork_server is not None:
        fork_server.end()


@pytest.fixture
def wait_until() -> Callable[..., None]:
    def wait(condition: Callable[[], bool], *, what: str, timeout_s: float = 120.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {timeout_s} s"
            time.sleep(0.005)

    return wait


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Yields a function that mounts a file system of a size such as 1m. Skips the test without permission to mount."""
    disk = tmp_path / "disk"

    def make(size: str) -> Path:
        disk.mkdir()
        command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(disk)]
        mount = subprocess.run(command, capture_output=True, text=True, check=False)
        if mount.returncode:
            pytest.skip(f"needs leave to mount a tmpfs: {mount.stderr.strip()}")
        return disk

    yield make
    if disk.is_mount():
        subprocess.run(["umount", str(disk)], check=True)
