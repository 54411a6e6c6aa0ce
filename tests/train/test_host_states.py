"""Tests the buckets of `HostStates`, weights that are loaded later, and the critic's states.

test_state_offload.py compares whole trainings bit by bit.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from relax_core.config.choices import StatesPlace
from relax_core.train import host_states, process_group
from relax_core.train.host_states import buckets
from relax_core.train.optimizer import optimizer_tensors
from tests.train.tiny_models import make_model
from tests.train.tiny_trainer import dp_groups, make_backend, make_critic, train_step

ON_HOST = {"states": StatesPlace.host}


def test_a_bucket_has_several_small_parameters_or_a_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_states, "UPDATE_BUCKET_ELEMENTS", 10)
    parameters = [torch.empty(size) for size in (4, 6, 1, 30, 5, 5, 5)]
    found = [[len(parameter) for parameter in bucket] for bucket in buckets(parameters)]
    assert found == [[4, 6], [1], [30], [5, 5], [5]]
    assert list(buckets([])) == []


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models")
    make_model(path / "tied", tied=True)
    return path / "tied"


def test_weights_that_are_loaded_later_reach_the_master_weights(folder: Path) -> None:
    trained = []
    for optimizer in ({}, ON_HOST):
        backend = make_backend(folder, dtype="bfloat16", optimizer=optimizer)
        train_step(backend, dp_groups())
        backend.load_weights((name, tensor.clone() * 0.5) for name, tensor in backend.export())
        train_step(backend, dp_groups(), step=1)
        trained.append({name: tensor.clone() for name, tensor in backend.export()})
        process_group.leave()
    plain, on_host = trained
    assert all(torch.equal(plain[name], on_host[name]) for name in plain)


def test_a_critics_states_are_on_the_host(folder: Path) -> None:
    losses = []
    for optimizer in ({}, ON_HOST):
        critic = make_critic(folder, optimizer=optimizer)
        losses.append([train_step(critic, dp_groups(), step=step).loss for step in range(3)])
        moments = [tensor for tensor in optimizer_tensors(critic.optimizer) if tensor.dim()][len(critic._parameters) :]
        assert moments and {bool(tensor.untyped_storage().nbytes()) for tensor in moments} == {optimizer != ON_HOST}
        process_group.leave()
    assert losses[0] == losses[1] and len(set(losses[0])) == 3
