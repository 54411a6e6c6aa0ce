"""Tests the turns of trainer and engines on shared GPUs: the lock between processes, and the GPUs of each engine."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.roles.gpu_turns import GpuTurn, shared_gpus, visible_gpus
from tests.roles.run_context import context_in

HOLDER = """
import contextlib, pathlib, sys
from relax_core.roles.gpu_turns import GpuTurn

turn = GpuTurn(pathlib.Path(sys.argv[1]), timeout_s=1.0, waiting=lambda what, on: contextlib.nullcontext())
turn.begin(alone=sys.argv[2] == "alone", what="a turn", on="a test")
print("begun", flush=True)
sys.stdin.read()
"""


class Waits(list[str]):
    """Records the waits of a worker."""

    @contextmanager
    def __call__(self, what: str, *, on: str) -> Iterator[None]:
        self.append(f"{what} of {on}")
        yield


@contextmanager
def holder(file: Path, kind: str) -> Iterator[subprocess.Popen[str]]:
    """Holds a turn in another process, until the block ends or kills it."""
    command = [sys.executable, "-c", HOLDER, str(file), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "begun\n"
        yield process
        process.kill()


@pytest.mark.parametrize("kind", ["alone", "together"])
def test_a_turn_alone_waits_for_other_processes_and_names_them(tmp_path: Path, kind: str) -> None:
    waits = Waits()
    turn = GpuTurn(tmp_path / "turn", timeout_s=0.3, waiting=waits)
    with holder(tmp_path / "turn", kind) as other:
        with pytest.raises(TimeoutError, match=r"the turn.*engine.*0\.3 s"):
            turn.begin(alone=True, what="the turn", on="engine")
        assert waits == ["the turn of engine"]
        other.kill()
        other.wait()
        turn.begin(alone=True, what="the turn", on="engine")  # the kernel has released the killed process's lock
        turn.end()


def test_engines_start_together_but_not_in_the_trainers_turn(tmp_path: Path) -> None:
    waits = Waits()
    turn = GpuTurn(tmp_path / "turn", timeout_s=0.1, waiting=waits)
    with holder(tmp_path / "turn", "together"), turn.held(alone=False, what="the turn", on="actor-0"):
        assert not waits
    with holder(tmp_path / "turn", "alone"), pytest.raises(TimeoutError, match="actor-0"):
        turn.begin(alone=False, what="the turn", on="actor-0")


def test_each_engine_has_its_own_of_the_visible_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = ["placement=gpu", "engine=sglang", "engine.tp=2", "engine.count=2", "placement.gpus_per_node=4"]
    context = context_in(tmp_path, *overrides, "mode=colocate", "parallel.dp=4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7, 5,3,1,0")
    context = replace(context, gpus=visible_gpus(context.config.placement))
    assert [shared_gpus(context, rank) for rank in range(2)] == [("7", "5"), ("3", "1")]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert visible_gpus(context.config.placement) == ("0", "1", "2", "3")
    separate = context_in(
        tmp_path, *overrides, "engine.count=1", "+placement.roles.actor=2", "+placement.roles.rollout=2"
    )
    assert shared_gpus(replace(separate, gpus=("0", "1", "2", "3")), 0) == ()
