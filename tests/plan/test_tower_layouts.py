"""Tests the plan's comparison of tower layouts: items distributed over ranks, and a first stage with fewer layers."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from relax_core.config.compose import compose, load_config, typed_config
from relax_core.plan.batch import tower_share
from relax_core.plan.build_plan import Plan, make_plan
from relax_core.plan.memory_plan import gpu_holders
from relax_core.plan.memory_terms import GIB, patches_of_micro_batch, patches_of_rank, share_of, stages_of
from relax_core.plan.model_dimensions import find_dimensions

SEE = ["model=tiny_qwen3_vl", "data=see"]
LARGE = ["experiment=qwen3_vl_8b_async_8gpu"]
WAY = re.compile(
    r"  parallel\.shard_media=(\w+)(?: parallel\.first_stage_layers=(\w+))?: ([\d.]+) GiB; ([\d.]+)( \(c.*)?"
)


def ways_of(plan: Plan) -> dict[tuple[str, str | None], tuple[float, float, bool]]:
    """Returns by (shard_media, first_stage_layers): memory in GiB, time, and whether it is the configured choice."""
    found = [WAY.fullmatch(line) for line in plan.media]
    return {
        (match[1], match[2]): (float(match[3]), float(match[4]), bool(match[5])) for match in found if match is not None
    }


def test_a_dealt_tower_takes_an_equal_share_of_time() -> None:
    config = load_config([*SEE, "parallel.tp=2"])
    plan = make_plan(config)
    share = tower_share(config, plan.work, plan.model)
    ways = ways_of(plan)
    assert ways.keys() == {("false", None), ("true", None)}
    assert ways["false", None][1:] == (pytest.approx(1 + share, abs=0.01), True)
    assert ways["true", None][1:] == (1.0, False)
    assert share < 0.1 and "unbalance" not in plan.media[-1]
    dealt = make_plan(load_config([*SEE, "parallel.tp=2", "parallel.shard_media=true"]))
    assert ways_of(dealt)["true", None][2]
    actors = [next(holder for holder in some_plan.memory if holder.name == "actor") for some_plan in (plan, dealt)]
    whole_terms, terms = (next(phase for phase in actor.phases if phase.name == "backward").terms for actor in actors)
    assert terms["tower activations"] == pytest.approx(whole_terms["tower activations"] / 2, rel=0.01)
    assert terms["features"] == whole_terms["features"]  # each rank gathers the features of all items


def test_a_dealt_item_is_never_cut() -> None:
    config = load_config([*SEE, "parallel.tp=2", "parallel.shard_media=true", "parallel.micro_batch_patches=64"])
    work = make_plan(config).work
    assert work.media is not None
    assert patches_of_micro_batch(config.parallel, work) == work.media.most_patches == 144
    assert patches_of_rank(config.parallel, work) == max(72, work.media.item_patches)


def test_one_rank_has_no_ways() -> None:
    assert not ways_of(make_plan(load_config(SEE)))
    assert not ways_of(make_plan(load_config(["parallel.tp=2"])))


def test_fewer_layers_are_proposed_where_towers_unbalance_the_stages() -> None:
    """With n layers and a share t of the products in the tower, a first stage of f layers takes t + (1 - t) f / n."""
    words = [*LARGE, "parallel.tp=2", "parallel.pp=2", "parallel.dp=1"]
    config = typed_config(compose(words))
    plan = make_plan(config)
    share, layers = tower_share(config, plan.work, plan.model), plan.model.layers
    dealt_parallel = replace(config.parallel, shard_media=True)
    passed = {
        False: 1.0,
        True: patches_of_rank(dealt_parallel, plan.work) / patches_of_micro_batch(dealt_parallel, plan.work),
    }
    assert 0.5 <= passed[True] < 0.9

    def slowest(first: int, *, dealt: bool) -> float:
        in_first = (1 - share) * first / layers / 2 + share * passed[dealt]
        return max(in_first, (1 - share) * (layers - first) / layers / 2) * 4

    ways = ways_of(plan)
    assert len(ways) == 4 and ways["false", "null"][2]
    for (dealt, first), (memory, time, _) in ways.items():
        changes = {"shard_media": dealt == "true", "first_stage_layers": None if first == "null" else int(first or 0)}
        expected = slowest(changes["first_stage_layers"] or layers // 2, dealt=dealt == "true")
        assert time == pytest.approx(expected, abs=0.01)
        changed = replace(config, parallel=replace(config.parallel, **changes))
        actor = next(holder for holder in gpu_holders(changed, {"actor": 4}, model=plan.model, work=plan.work))
        assert memory == pytest.approx(actor.peak.bytes / GIB, abs=0.01)
    for dealt in (False, True):
        best = min(range(plan.model.deepstack_layers, layers // 2), key=lambda first: slowest(first, dealt=dealt))
        assert (str(dealt).lower(), str(best)) in ways
    assert (
        "The towers unbalance the ranks. Set parallel.shard_media=true parallel.first_stage_layers=" in plan.media[-1]
    )


def test_the_fuller_stage_counts() -> None:
    """The first stage has three of 36 layers and the towers. Each other stage has eleven layers."""
    words = ["parallel.tp=1", "parallel.pp=4", "parallel.sequence_parallel=false", "parallel.first_stage_layers=3"]
    config = typed_config(compose([*LARGE, *words, "parallel.recompute=full", "parallel.micro_batch_patches=4096"]))
    model, plan = find_dimensions(config), make_plan(config)
    first, later = (share_of(config.parallel, model, later=later) for later in stages_of(config.parallel))
    embedding = model.vocabulary * model.hidden
    assert (first.dense, first.whole) == (model.layer_parameters * 3 // 36 + embedding, model.tower_parameters)
    assert (later.dense, later.whole) == (model.layer_parameters * 11 // 36 + embedding, 0)
    assert (
        next(holder for holder in plan.memory if holder.name == "actor").peak.terms["weights"] == 2 * later.parameters
    )


def test_engines_that_deal_images_hold_the_whole_tower() -> None:
    words = [*LARGE, "engine.tp=2", "engine.count=2"]
    config = typed_config(compose(words))
    plans = [make_plan(config), make_plan(replace(config, parallel=replace(config.parallel, shard_media=True)))]
    engines = [next(holder for holder in plan.memory if holder.name == "rollout").peak.terms for plan in plans]
    assert engines[1]["engine weights"] - engines[0]["engine weights"] == plans[0].model.tower_parameters  # half, x 2
    assert plans[1].media[-1] == "engine=sglang also distributes images over its GPUs (--mm-enable-dp-encoder)."
