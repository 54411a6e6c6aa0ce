"""Tests how the choice of the weight transport depends on the nodes of trainer and engines."""

from __future__ import annotations

import pytest

from relax_core.config.choices import ModeName, WeightTransportName
from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.config.validate import transport_problems
from relax_core.weights.transport_choice import choose_transport


@pytest.fixture
def config() -> RelaxConfig:
    return load_config([])


def chosen(config: RelaxConfig) -> str:
    choice = choose_transport(config)
    assert choice.reason
    return choice.name.value


@pytest.mark.parametrize("engine", ["embedded", "sglang"])
def test_the_topology_chooses(config: RelaxConfig, engine: str) -> None:
    config.engine.name = engine
    assert chosen(config) == "shared_memory"
    config.launcher.ray_address = "10.0.0.1:6379"
    assert chosen(config) == "disk"
    config.launcher.ray_address = None
    config.placement.nodes = 2  # e.g. plan=true on a machine outside the Ray cluster
    assert chosen(config) == "disk"
    config.placement.nodes = 1
    config.engine.urls = ["http://10.0.0.2:30000"]
    assert chosen(config) == "disk"


@pytest.mark.parametrize("name", ["shared_memory", "disk", "gloo"])
def test_a_wish_is_followed(config: RelaxConfig, name: str) -> None:
    config.engine.weight_transport = WeightTransportName(name)
    assert chosen(config) == name
    assert list(transport_problems(config)) == []


def test_what_cannot_be_is_refused_with_what_can(config: RelaxConfig) -> None:
    config.engine.weight_transport = WeightTransportName.nccl
    (problem,) = transport_problems(config)
    assert "NCCL needs trainer and engines on GPUs. Use engine.weight_transport=auto." in problem
    config.engine.name, config.placement.gpus_per_node = "sglang", 8
    config.mode.name = ModeName.colocate
    (problem,) = transport_problems(config)
    assert "NCCL wants one rank a GPU" in problem
    config.mode.name = ModeName.asynchronous
    assert list(transport_problems(config)) == []
    config.engine.urls = ["http://10.0.0.2:30000"]
    (problem,) = transport_problems(config)
    assert "Use disk, or auto." in problem
