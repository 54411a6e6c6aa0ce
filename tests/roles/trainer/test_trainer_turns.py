"""Tests the order in which trainer and engines hand over the memory of their devices."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from relax_core.roles.gpu_turns import GpuTurn
from relax_core.roles.trainer.trainer_turns import TrainerTurns


class Calls(list[str]):
    """Records calls of the engines and of the trainer's ranks."""

    def part(self, name: str) -> Any:
        calls = self

        class Part:
            def __getattr__(self, method: str) -> Any:
                return lambda **settings: calls.append(" ".join([name, method, *map(str, settings.values())]))

        return Part()


def make_turns(calls: Calls, *, offloads: bool, gpus: GpuTurn | None) -> TrainerTurns:
    turns = TrainerTurns(calls.part("engines"), offloads=offloads, gpus=gpus, end_push=lambda: calls.append("end push"))
    turns.worker_group = calls.part("ranks")
    return turns


def test_on_shared_gpus_the_state_is_on_the_device_only_while_the_engines_memory_is_released(tmp_path: Path) -> None:
    def waiting(what: str, *, on: str) -> Any:
        return nullcontext()

    lock, other = (GpuTurn(tmp_path / "turn", timeout_s=0.0, waiting=waiting) for _ in range(2))
    calls = Calls()
    turns = make_turns(calls, offloads=True, gpus=lock)
    turns.begin()
    turns.begin()  # a step may lease twice
    assert calls == ["engines release_memory True", "ranks onload"]
    with pytest.raises(TimeoutError):  # an engine starts
        other.begin(alone=False, what="the turn", on="actor-0")
    calls.clear()
    turns.before_publication()
    calls.append("publish")
    turns.end()
    assert calls == [
        *("ranks offload_optimizer", "engines resume_weights", "publish"),
        *("ranks offload", "end push", "engines resume_memory"),
    ]
    other.begin(alone=False, what="the turn", on="actor-0")


def test_a_checkpoint_between_turns_takes_a_turn() -> None:
    calls = Calls()
    turns = make_turns(calls, offloads=True, gpus=None)
    with turns.with_state():
        calls.append("save")
    assert calls == [
        *("engines release_memory False", "ranks onload", "save"),
        *("ranks offload_optimizer", "ranks offload", "end push", "engines resume_memory"),
    ]
    calls.clear()
    turns.begin()
    calls.clear()
    with turns.with_state():
        calls.append("save")
    assert calls == ["save"]


def test_on_cpus_only_the_engines_release_memory() -> None:
    calls = Calls()
    turns = make_turns(calls, offloads=False, gpus=None)
    turns.begin()
    turns.before_publication()
    turns.end()
    with turns.with_state():
        calls.append("save")
    assert calls == ["engines release_memory False", "end push", "engines resume_memory", "save"]
