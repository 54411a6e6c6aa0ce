"""Tests the first cause and the class of a worker's failure."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import pytest

from relax_core.contracts.bus import BusLost, BusTimeout, LeaseLost
from relax_core.contracts.engine import EngineError, EngineUnreachable
from relax_core.contracts.media import MediaGone
from relax_core.contracts.reward import RewardInput
from relax_core.registry import find_reward
from relax_core.roles.failure import failure_line, first_cause, is_broken_collective, what_was_lost
from relax_core.weights.version_folder import PublishedUnreadable

PLUGIN = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    pass

def helper():
    raise KeyError("price")

def score(given, config):
    return helper()

SPEC = RewardSpec(name="mine", summary="", config=Config, score=score)
"""


def caught(call: object) -> BaseException:
    with pytest.raises(BaseException) as found:
        call()  # type: ignore[operator]
    return found.value


def test_a_plugins_failure_names_its_file_and_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(PLUGIN)
    given = RewardInput(response="", stopped=True, answer="", row={})
    error = caught(lambda: find_reward(str(path)).score(given, None))
    assert failure_line(error) == f"KeyError: 'price' ({path}, line 10)"


def test_an_expected_failure_is_one_line() -> None:
    assert failure_line(caught(lambda: int("x"))) == "ValueError: invalid literal for int() with base 10: 'x'"
    assert failure_line(OSError("first\nsecond")) == "OSError: first"


def test_of_a_task_group_the_first_failure_counts() -> None:
    first, later = ValueError("the cause"), RuntimeError("what came of it")
    group = ExceptionGroup("tasks", [ExceptionGroup("inner", [first]), later])
    assert first_cause(group) is first
    assert failure_line(group) == "ValueError: the cause"


def test_an_error_that_came_through_ray_is_the_one_raised_there(ray_session: str) -> None:
    import ray

    @ray.remote(num_cpus=0)
    def fails() -> None:
        raise ValueError("the rank's own words")

    error = caught(lambda: ray.get(fails.remote(), timeout=120))
    assert len(str(error).splitlines()) > 1
    assert failure_line(error) == "ValueError: the rank's own words"


def gone_actor() -> BaseException:
    from ray.exceptions import ActorDiedError

    return ActorDiedError()


def lost_rank() -> BaseException:
    from relax_core.roles.failure import RankLost

    return RankLost("trainer rank 1 was lost")


@pytest.mark.parametrize(
    ("make", "lost"),
    [
        (lambda: BusLost("the bus process is gone"), "bus"),
        (lambda: ExceptionGroup("tasks", [BusLost("gone"), ValueError("cancelled")]), "bus"),
        (lost_rank, "rank"),
        (lambda: EngineUnreachable("engine 0 has answered nothing"), "engine"),
        (gone_actor, "process"),
        (lambda: PublishedUnreadable("latest.json is damaged"), "weights"),
        (lambda: BusTimeout("actor waits for 8 groups"), "time"),
        (lambda: TimeoutError("bus was not there"), "time"),
        (lambda: LeaseLost("lease 7 is not held"), "lease"),
        (lambda: MediaGone("media 00: there is no such item"), "lease"),
        (lambda: OSError(errno.EMFILE, "Too many open files"), "machine"),
        (lambda: OSError(errno.ENOMEM, "Cannot allocate memory"), "machine"),
        (lambda: FileNotFoundError(errno.ENOENT, "No such file"), None),
        (lambda: EngineError("engine did not start: no such model"), None),
        (lambda: ValueError("data row 3"), None),
        (lambda: RuntimeError("loss is NaN"), None),
    ],
)
def test_a_failure_of_another_process_differs_from_an_own_failure(
    make: Callable[[], BaseException], lost: str | None
) -> None:
    assert what_was_lost(make()) == lost


def test_a_collective_that_breaks_is_of_others_and_a_ranks_own_error_is_not(tmp_path: Path) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    soon, patience = timedelta(milliseconds=200), timedelta(minutes=2)
    store = dist.FileStore(str(tmp_path / "store"), 2)
    with ThreadPoolExecutor(max_workers=2) as pool:
        joined = [pool.submit(dist.ProcessGroupGloo, store, rank, 2, patience) for rank in range(2)]
        alone, _other = (cast(Any, result.result()) for result in joined)

    def root(rank: int) -> dist.BroadcastOptions:
        options = dist.BroadcastOptions()
        options.rootRank = rank
        options.timeout = soon
        return options

    def barrier() -> None:
        alone.monitored_barrier(soon, True)

    def wrapped() -> None:
        try:
            barrier()
        except RuntimeError as error:
            raise TimeoutError("train step 3") from error

    broken = [lambda: alone.broadcast([torch.zeros(1)], root(1)).wait(), barrier, wrapped]
    broken += [lambda: alone.broadcast([torch.zeros(1)], root(1)).wait(), lambda: dist.HashStore().wait(["who"], soon)]
    for call in broken:
        error = caught(call)
        assert is_broken_collective(error), error
    own = [lambda: torch.zeros(2) @ torch.zeros(3), lambda: alone.broadcast([torch.zeros(1)], root(7))]
    own += [lambda: torch.empty(1 << 60), lambda: [][0]]
    for call in own:
        error = caught(call)
        assert not is_broken_collective(error), error
