"""Tests the reward pool with real worker processes, and reward plug-ins that hang, crash or return wrong values.

The worker processes have no sandbox, because the tests need their process ids and files.
tests/security/test_reward_sandbox.py covers the sandbox.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts import child_process
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput
from relax_core.contracts.stop_signals import STOP_SIGNALS
from relax_core.registry import find_reward
from relax_core.rollout.rewards.reward_failures import RewardsFailed
from relax_core.rollout.rewards.reward_pool import RewardPool

LONG_S = 120.0  # a timeout that no test reaches

PLUGIN = """
import os, signal, subprocess, sys, time
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardOutput, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "odd"
    timeout_s: float = 120.0
    scale: float = 1.0

def score(given, config):
    what, _, argument = given.response.partition(" ")
    if what == "sleep":
        time.sleep(float(argument))
    if what == "until":
        while not os.path.exists(argument):
            time.sleep(0.01)
    if what == "spin":
        10 ** 10 ** 10  # one C call that never lets go of the interpreter
    if what == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "exit":
        os._exit(3)
    if what == "close":
        os.closerange(3, 256)
        time.sleep(600)
    if what == "raise":
        raise RuntimeError(argument)
    if what == "print":
        print("noise")
        sys.stdout.flush()
    if what == "nan":
        return RewardOutput(reward=float("nan"))
    if what == "terminate":
        with subprocess.Popen(["sleep", "600"]) as child:
            child.terminate()
            return RewardOutput(reward=float(child.wait(100)), parts={"pid": float(os.getpid())})
    if what == "child":
        subprocess.Popen(["sleep", "600"])
        time.sleep(600)
    return RewardOutput(reward=config.scale * len(given.response), parts={"pid": float(os.getpid())})

SPEC = RewardSpec(name="odd", summary="odd", config=Config, score=score, isolated=ISOLATED)
"""


@pytest.fixture
def make_pool(tmp_path: Path) -> Any:
    pools: list[RewardPool] = []

    def make(*, workers: int = 1, isolated: bool = True, code: str = PLUGIN, **config: Any) -> RewardPool:
        path = tmp_path / f"odd{len(pools)}.py"
        path.write_text(code.replace("ISOLATED", str(isolated)))
        spec = find_reward(str(path))
        pools.append(RewardPool(spec, spec.config(name=str(path), sandbox="none", **config), workers=workers))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def _given(*responses: str) -> list[RewardInput]:
    """Returns reward inputs: these answers to one data row."""
    row = {"level": 3}
    return [RewardInput(response=text, stopped=True, answer="a", row=row) for text in responses]


def score(pool: RewardPool, inputs: list[RewardInput]) -> list[RewardOutput]:
    return asyncio.run(pool.score(inputs))


def _pids(pool: RewardPool) -> set[int]:
    return {worker.process.pid for worker in pool._workers}


def _alive(pid: int) -> bool:
    """Returns whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(true: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LONG_S
    while not true():
        assert time.monotonic() < give_up, "waited too long"
        time.sleep(0.02)


def test_rewards_come_in_order_from_several_workers(make_pool: Any) -> None:
    pool = make_pool(workers=2, scale=2.0, timeout_s=LONG_S)
    outputs = score(pool, _given(*("x" * (n % 7) for n in range(60))))
    assert [output.reward for output in outputs] == [2.0 * (n % 7) for n in range(60)]
    assert {int(output.parts["pid"]) for output in outputs} <= _pids(pool)
    assert os.getpid() not in _pids(pool)


def test_a_reward_that_is_not_isolated_runs_here(make_pool: Any) -> None:
    pool = make_pool(isolated=False)
    assert score(pool, _given("abc"))[0].parts == {"pid": float(os.getpid())}


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("die", "its process died (signal SIGKILL)"),
        ("exit", "its process died (exit code 3)"),
        ("raise odd input", "RuntimeError: odd input"),
    ],
)
def test_a_failed_score_is_no_reward_and_the_next_one_works(make_pool: Any, response: str, reason: str) -> None:
    pool = make_pool()
    first, second = score(pool, _given(response, "abc"))
    assert first.reward is None
    assert reason in first.reason
    assert second.reward == 3.0


@pytest.mark.parametrize("response", ["sleep 600", "spin"])
def test_a_score_that_hangs_is_no_reward_and_later_ones_work(make_pool: Any, response: str) -> None:
    pool = make_pool(timeout_s=1.0)
    (hangs,) = score(pool, _given(response))
    assert hangs.reward is None
    assert "no answer within 1 s" in hangs.reason
    _wait_until(lambda: score(pool, _given("abc"))[0].reward == 3.0)  # on a slow machine this may take a second


def test_a_worker_that_closed_its_pipe_is_not_waited_for(make_pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_CLOSED_S", 0.2)
    pool = make_pool()
    (output,) = score(pool, _given("close"))
    assert output.reward is None and "closed its pipe and keeps running" in (output.reason or "")
    assert score(pool, _given("abc"))[0].reward == 3.0


def test_a_killed_worker_takes_its_children_along(make_pool: Any) -> None:
    pool = make_pool()
    (before,) = _pids(pool)
    scored = threading.Thread(
        target=score,
        args=(
            pool,
            _given("child"),
        ),
    )
    scored.start()
    children = Path(f"/proc/{before}/task/{before}/children")
    _wait_until(lambda: bool(children.read_text().split()))
    (child,) = map(int, children.read_text().split())
    pool._workers[0].process.kill()  # as the pool does after the time limit
    scored.join(LONG_S)
    assert not scored.is_alive()
    _wait_until(lambda: not _alive(child))
    assert not _alive(before)


def test_a_stop_of_the_run_ends_no_worker_and_a_reward_may_end_its_programs(make_pool: Any) -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)  # every process of a run blocks these signals
    try:
        pool = make_pool()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    (first,) = score(pool, _given("abc"))
    os.kill(int(first.parts["pid"]), signal.SIGTERM)
    (second,) = score(pool, _given("terminate"))
    assert (second.reward, second.parts) == (-signal.SIGTERM, first.parts)


def test_what_a_reward_prints_does_not_disturb(make_pool: Any) -> None:
    assert [output.reward for output in score(make_pool(), _given("print", "ab"))] == [5.0, 2.0]


def test_a_large_input_and_row_pass(make_pool: Any) -> None:
    given = RewardInput(response="x" * 3_000_000, stopped=False, answer="", row={"list": list(range(1000))})
    assert score(make_pool(), [given])[0].reward == 3_000_000


@pytest.mark.parametrize("isolated", [True, False])
def test_what_is_no_number_or_raises_is_no_reward_and_says_why(make_pool: Any, isolated: bool) -> None:
    outputs = score(make_pool(isolated=isolated), _given("nan", "raise broken", "abc"))
    assert [output.reward for output in outputs] == [None, None, 3.0]
    assert "reward odd: reward is nan" in outputs[0].reason
    assert "RuntimeError: broken (" in outputs[1].reason and "odd0.py, line 29)" in outputs[1].reason


@pytest.mark.parametrize("isolated", [True, False])
def test_too_many_answers_without_a_reward_end_it_with_the_first_cause(make_pool: Any, isolated: bool) -> None:
    pool = make_pool(isolated=isolated, max_failed=0.25)
    for _ in range(6):  # two answers per data row; all answers fit into the window
        score(pool, _given("ab", "ab"))
    score(pool, _given("raise the first", "raise the second"))  # 2 failures of 14 answers
    assert pool.failures.share == pytest.approx(2 / 14)
    score(pool, _given("raise three", "ab"))  # 3 failures of 16 answers
    with pytest.raises(RewardsFailed, match=r"28% .*newest 9 data rows.*reward.max_failed=0.25.*the first"):
        score(pool, _given("raise four", "raise five"))  # 5 failures of 18 answers


def test_one_bad_row_ends_nothing(make_pool: Any) -> None:
    """All answers to the first data row fail before any other row is scored."""
    pool = make_pool(isolated=False, max_failed=0.0)
    outputs = score(pool, _given(*["raise it"] * 50))
    assert [output.reward for output in outputs] == [None] * 50


def test_a_reward_that_hangs_where_nobody_can_end_it_is_told(tmp_path: Path) -> None:
    path, go = tmp_path / "odd.py", tmp_path / "go"
    path.write_text(PLUGIN.replace("ISOLATED", "False"))
    spec = find_reward(str(path))
    told: list[Exception] = []
    with RewardPool(spec, spec.config(name=str(path), timeout_s=0.2), workers=1, on_hang=told.append) as pool:
        score(pool, _given(*["ab"] * 50))
        scoring = threading.Thread(
            target=score,
            args=(
                pool,
                _given(f"until {go}"),
            ),
        )
        scoring.start()
        _wait_until(lambda: bool(told))
        go.touch()
        scoring.join(LONG_S)
    assert len(told) == 1
    assert "took longer than reward.timeout_s=0.2 each" in str(told[0]) and "isolated=True" in str(told[0])


def test_what_a_worker_prints_is_in_its_log(make_pool: Any, tmp_path: Path) -> None:
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN.replace("ISOLATED", "True").replace("        sys.stdout.flush()\n", ""))
    spec = find_reward(str(path))
    log = tmp_path / "reward.log"
    with RewardPool(spec, spec.config(name=str(path)), workers=1, log_file=log) as pool:
        score(pool, _given("print"))
        _wait_until(lambda: log.exists() and log.read_text() == "noise\n")  # a thread writes it


def test_groups_that_are_scored_at_once_get_their_own_outputs(make_pool: Any) -> None:
    pool = make_pool(workers=2, timeout_s=LONG_S)

    async def score_all() -> list[list[RewardOutput]]:
        return await asyncio.gather(*(pool.score(_given(*["x" * length] * 20)) for length in range(6)))

    results = asyncio.run(score_all())
    assert [[output.reward for output in of_group] for of_group in results] == [[float(n)] * 20 for n in range(6)]


def test_closing_ends_all_workers_also_in_the_middle_of_a_score(make_pool: Any) -> None:
    pool = make_pool(workers=2, timeout_s=600.0)
    score(pool, _given("a", "b"))
    pids = _pids(pool)
    raised: list[BaseException] = []

    def score_until_closed() -> None:
        try:
            score(pool, _given("sleep 600", "sleep 600", "sleep 600"))
        except RuntimeError as error:
            raised.append(error)

    scoring = threading.Thread(target=score_until_closed)
    scoring.start()
    _wait_until(lambda: pool._idle.empty())
    pool.close()
    scoring.join(timeout=LONG_S)
    assert not scoring.is_alive()
    assert "closed" in str(raised[0])
    assert not any(_alive(pid) for pid in pids | _pids(pool))
    pool.close()


def test_a_worker_that_cannot_start_says_why(tmp_path: Path) -> None:
    spec = find_reward("reverse_digits")
    gone = RewardPool(
        dataclasses.replace(spec, isolated=True), RewardConfig(name="no_such_reward", timeout_s=1.0), workers=1
    )
    with gone, pytest.raises(RuntimeError, match=r"could not start: PluginError: .*no_such_reward"):
        score(gone, _given("a"))


@pytest.mark.parametrize("busy", ["idle", "sleep 600", "spin"])
def test_no_worker_outlives_an_owner_that_is_killed(tmp_path: Path, busy: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text(PLUGIN.replace("ISOLATED", "True"))
    limit_s = 6.0 if busy == "spin" else LONG_S
    owner = subprocess.Popen(
        [
            sys.executable,
            "-c",
            textwrap.dedent(f"""
            import asyncio
            from relax_core.contracts.reward import RewardInput
            from relax_core.registry import find_reward
            from relax_core.rollout.rewards.reward_pool import RewardPool
            spec = find_reward({str(path)!r})
            pool = RewardPool(spec, spec.config(name={str(path)!r}, timeout_s={limit_s}, sandbox="none"), workers=1)
            def score(text):
                given = RewardInput(response=text, stopped=True, answer="a", row={{}})
                asyncio.run(pool.score([given]))
            score("idle")
            print(pool._workers[0].process.pid, flush=True)
            score({busy!r}) if {busy!r} != "idle" else input()
            """),
        ],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    try:
        worker = int(owner.stdout.readline())
        if busy == "spin":
            used = _cpu_ticks(worker)
            _wait_until(lambda: _cpu_ticks(worker) > used + 10)
        os.kill(owner.pid, signal.SIGKILL)
        owner.wait()
        # A worker that never releases the GIL is ended by its CPU timer, 1 s after the time limit.
        _wait_until(lambda: not _alive(worker))
    finally:
        owner.kill()
        owner.wait()
        owner.stdout.close()
        owner.stdin.close()


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_the_math_reward_runs_in_a_worker() -> None:
    spec = find_reward("math")
    with RewardPool(spec, spec.config(name="math", timeout_s=LONG_S), workers=1) as pool:
        given = [RewardInput(response=text, stopped=True, answer="42", row={}) for text in ("it is 42", "41")]
        assert [output.reward for output in score(pool, given)] == [1.0, 0.0]
