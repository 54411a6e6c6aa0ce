"""Divides tests between the workers of `pytest -n 2`: the tests that stay together, and the tests that begin first."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

# All tests that need the session's Ray run on one worker, so only one Ray is started. Every other file is a group.
RAY = (
    "tests/bus/",
    "tests/contracts/bus/",
    "tests/control/",
    "tests/roles/trainer/test_column_worker.py",
    "tests/roles/test_engine_directory.py",
    "tests/roles/test_failure.py",
    "tests/roles/trainer/",
    "tests/roles/test_process_placement.py",
    "tests/rollout/test_held_items.py",
)
# These files check one finished run. `tests/integration/conftest.py` makes this run once per worker.
STRICT_RUN = (
    "tests/integration/test_export.py",
    "tests/integration/test_kills.py",
    "tests/integration/test_metrics_page.py",
    "tests/integration/test_on_policy.py",
)
# The intruder in the first file connects to every port of this machine, also to the store for the ranks' rendezvous.
RAIDS = ("tests/security/test_ray_ports.py", "tests/security/test_rank_store.py")
TOGETHER = {"Ray": RAY, "strict run": STRICT_RUN, "raids": RAIDS}
# The longest tests begin first. Otherwise one worker would run them alone at the end.
LONG_RUNS = tuple(
    f"tests/integration/test_{name}.py"
    for name in ("ppo", "turns", "elastic", "elastic_kills", "recovery", "chaos", "distill", "media_rows")
)
RUNS = (*STRICT_RUN, *LONG_RUNS, "tests/integration/")
FIRST = (*RAY, *RUNS, "tests/train/", "tests/contracts/engine/", "tests/engines/")


def group_of(nodeid: str) -> str:
    """Returns the group of a test: its file, or the name of a group of files. One worker runs all tests of a group."""
    for name, paths in TOGETHER.items():
        if nodeid.startswith(paths):
            return name
    return nodeid.partition("::")[0]


def place_of(nodeid: str) -> int:
    """Returns the index of a test's group in the order of starts. Tests with the same index keep pytest's order."""
    return next((place for place, path in enumerate(FIRST) if nodeid.startswith(path)), len(FIRST))


class GroupScheduling(LoadScopeScheduling):
    """Assigns the next complete group to an idle worker."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
