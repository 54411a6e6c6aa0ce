from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.roles.process_placement import (
    A_LITTLE,
    LOOPBACK,
    actor_columns,
    cluster_fault,
    node_address,
    node_options,
    rank_bundles,
    rank_options,
    reserve_ranks,
    roles_of,
    worker_gpus,
    worker_group_layouts,
)


def test_the_runs_ray_listens_on_loopback_and_pins_no_cores() -> None:
    launcher = load_config().launcher
    assert node_address(launcher) == LOOPBACK
    assert node_options(launcher, "engine", 1) == {"num_cpus": 0}


def test_ranks_take_a_gpu_each_or_nearly_nothing() -> None:
    placement = load_config().placement
    assert sum(bundle["CPU"] for bundle in rank_bundles(placement, 64)) < 1
    gpus = [bundle["GPU"] for bundle in rank_bundles(replace(placement, gpus_per_node=8), 4)]
    assert gpus == [1.0] * 4


def test_a_worker_that_holds_a_model_takes_its_gpus() -> None:
    config = load_config(["algo=ppo"])
    roles = ("actor", "critic", "reference", "actor_fwd", "teacher", "rollout", "advantages", "engine")
    assert not any(worker_gpus(config, role) for role in roles)
    config.placement = replace(config.placement, gpus_per_node=8)
    config.engine.tp = 4
    assert [worker_gpus(config, role) for role in roles] == [1, 1, 1, 1, 1, 0, 0, 0]
    config.engine.name = "sglang"
    assert [worker_gpus(config, role) for role in ("engine", "teacher_engine")] == [4, 4]
    assert node_options(config.launcher, "engine", 1, gpus=4) == {"num_cpus": 0, "num_gpus": 4}
    joined = replace(config.launcher, ray_address="auto")
    assert node_options(joined, "engine", 1, gpus=4) == {"num_cpus": A_LITTLE, "num_gpus": 4}


def test_the_actor_computes_log_probs_and_advantages_in_the_place_of_other_roles() -> None:
    needs = ["algo.kl_coef=0.1", "algo.old_logprobs=actor_fwd"]
    separate, by_actor = (load_config([*needs, f"placement.forward={place}"]) for place in ("separate", "actor"))
    assert actor_columns(separate) == () and {"actor_fwd", "reference", "advantages"} <= roles_of(separate).keys()
    assert actor_columns(by_actor) == (c.OLD_LOGPROBS, c.REFERENCE_LOGPROBS, c.ADVANTAGES)
    assert roles_of(by_actor).keys() == {"actor", "engine", "rollout"}
    assert worker_group_layouts(by_actor).keys() == {"actor"}
    assert actor_columns(load_config(["placement.forward=actor"])) == ()
    critic = load_config(["algo=ppo", *needs, "placement.forward=actor"])
    assert c.RETURNS in actor_columns(critic) and "advantages" not in roles_of(critic)
    without = load_config(["algo=ppo", "placement.forward=actor"])
    assert actor_columns(without) == () and "advantages" in roles_of(without)


def test_engines_and_rollout_workers_are_spread_over_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    import ray

    context = SimpleNamespace(get_node_id=lambda: 56 * "b")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(ray, "nodes", lambda: [{"NodeID": 56 * letter, "Alive": letter != "d"} for letter in "abcd"])
    joined = replace(load_config().launcher, ray_address="auto")

    def nodes(role: str) -> str:
        options = [node_options(joined, role, rank) for rank in range(4)]
        return "".join(option["scheduling_strategy"].node_id[0] for option in options)

    assert (nodes("engine"), nodes("rollout"), nodes("advantages")) == ("acba", "bacb", "bbbb")


def test_a_joined_ray_without_the_gpus_is_told() -> None:
    placement = replace(load_config().placement, nodes=2, gpus_per_node=8)
    with_gpus = {"Alive": True, "Resources": {"CPU": 64.0, "GPU": 8.0}}
    without = {"Alive": True, "Resources": {"CPU": 64.0}}
    lost = {"Alive": False}
    assert cluster_fault(placement, [with_gpus, without, with_gpus, lost]) is None
    assert cluster_fault(replace(placement, gpus_per_node=0), [without]) is None
    fault = cluster_fault(placement, [with_gpus, without, lost])
    assert fault is not None and "the nodes of this Ray report 8, 0 GPUs." in fault


@pytest.mark.parametrize("ray_address", [None, "auto"])  # the run's private Ray; an external Ray cluster
def test_more_ranks_than_cores_start(ray_session: str, ray_address: str | None) -> None:
    import ray
    from ray.util.placement_group import remove_placement_group

    config = load_config()
    ranks = 2 * int(ray.cluster_resources()["CPU"])
    launcher = replace(config.launcher, ray_address=ray_address)
    group = reserve_ranks(launcher, config.placement, ranks)
    assert group.wait(timeout_seconds=120)
    remote: Any = ray.remote(Rank)
    last = remote.options(**rank_options(config.placement, group, ranks - 1)).remote()
    assert ray.get(last.group.remote(), timeout=120) == group.id.hex()
    remove_placement_group(group)


class Rank:
    def group(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_placement_group_id())


@pytest.mark.parametrize(
    ("algorithm", "place", "roles"),
    [
        ("sft", "separate", {"actor": 1, "rollout": 1}),
        ("dpo", "separate", {"actor": 1, "rollout": 1, "reference": 1}),
        ("dpo", "actor", {"actor": 1, "rollout": 1}),
    ],
)
def test_an_algorithm_on_data_rows_has_no_engine_and_no_role_for_advantages(
    algorithm: str, place: str, roles: dict[str, int], tmp_path: Path
) -> None:
    data = tmp_path / "rows.jsonl"
    data.touch()
    words = [f"algo={algorithm}", f"placement.forward={place}", "data=file", f"data.path={data}", "engine.count=2"]
    config = load_config([*words, "model.task=reverse_digits"])
    assert roles_of(config) == roles
    assert actor_columns(config) == ((c.REFERENCE_LOGPROBS,) if place == "actor" else ())
