"""Compares the coordinates of ranks with Megatron. Tests that each error names the key, the value and a working fix."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.config.choices import Recompute
from relax_core.config.schema import ForwardLayout, ParallelConfig
from relax_core.train.parallel_layout import (
    LayoutShape,
    combination_faults,
    equal_ranks,
    forward_parallel,
    model_faults,
    one_rank,
    rank_coordinates,
    rank_faults,
    replica_ranks,
    switch_faults,
    trainer_faults,
    world_size,
)

MIXTURE = LayoutShape(
    layers=48, heads=32, kv_heads=4, linear_heads=0, experts=128, expert_width=768, widths={"hidden units": 2048}
)
DENSE = dataclasses.replace(MIXTURE, experts=0, expert_width=0)
SIZES = {"tp": 4, "pp": 3, "cp": 3, "dp": 3, "ep": 6, "etp": 3}


def layout(*, sequence_parallel: bool | None = None, **sizes: int) -> ParallelConfig:
    """Makes a layout. By default it has sequence parallelism if possible."""
    if sequence_parallel is None:
        sequence_parallel = sizes.get("tp", 1) > 1
    whole = dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep", "etp"), 1) | sizes
    return ParallelConfig(
        **whole,  # type: ignore[arg-type]
        sequence_parallel=sequence_parallel,
        recompute=Recompute.none,
        distributed_optimizer=False,
        overlap=False,
    )


def test_the_first_chunk_must_hold_the_layers_that_add_outputs_of_the_tower() -> None:
    sees = dataclasses.replace(MIXTURE, layers=12, deepstack_layers=3)
    assert not faults(layout(pp=4), sees, ranks=4)
    (found,) = faults(layout(pp=6), sees, ranks=6)
    assert found.startswith("parallel.pp=6: the first chunk of layers has 2 of the model's 12, but")
    assert found.endswith("the first 3, which one chunk must hold. Use parallel.pp=1, 2, 3 or 4.")
    (found,) = faults(layout(pp=2, vpp=3), sees, ranks=2)
    assert found.startswith("parallel.pp=2 x vpp=3: the first chunk of layers has 2")
    assert found.endswith("Use parallel.vpp=1 or 2.")


@pytest.mark.parametrize(
    ("first", "pp", "vpp", "text"),
    [
        (3, 3, 1, None),
        (3, 4, 1, None),
        (6, 3, 2, None),
        (4, 3, 1, "the other stages cannot share the 11 left of the model's 15 layers equally. Use X=3."),
        (15, 3, 1, "the other stages cannot share the 0 left of the model's 15 layers equally. Use X=13."),
        (1, 2, 1, "the first chunk of layers has 1 of the model's 15, but the vision tower's outputs are added in the "
                  "first 2, which one chunk must hold. Use X=2."),
        (5, 2, 2, "the first stage cannot cut 5 layers into 2 equal chunks. Use X=null."),
        (4, 1, 1, "the only stage has all layers. Set X=null."),
    ],
)  # fmt: skip
def test_the_first_stage_can_hold_fewer_layers(first: int, pp: int, vpp: int, text: str | None) -> None:
    sees = dataclasses.replace(MIXTURE, layers=18 if first == 6 else 15, deepstack_layers=2, has_tower=True)
    found = faults(dataclasses.replace(layout(pp=pp, vpp=vpp), first_stage_layers=first), sees)
    assert found == [] if text is None else found[0].endswith(text.replace("X", "parallel.first_stage_layers")), found
    assert all(fault.startswith(f"parallel.first_stage_layers={first} with parallel.pp={pp}") for fault in found)


def test_items_are_dealt_where_there_are_ranks_and_a_tower() -> None:
    sees = dataclasses.replace(DENSE, has_tower=True)
    dealt = dataclasses.replace(layout(tp=2), shard_media=True)
    assert faults(dealt, sees) == [] and faults(dataclasses.replace(layout(cp=2), shard_media=True), sees) == []
    message = "parallel.shard_media=true without a tower: the model reads text only. Set parallel.shard_media=false."
    assert faults(dealt, DENSE) == [message]
    (found,) = faults(dataclasses.replace(layout(), shard_media=True), sees)
    assert found.endswith(
        "there is no other rank to share images, videos and sounds with. Set parallel.shard_media=false."
    )
    trainer = dataclasses.replace(layout(tp=2, pp=2), shard_media=True, first_stage_layers=2)
    assert forward_parallel(trainer, ForwardLayout(dp=1, tp=2, pp=2, ep=1)).shard_media
    assert not one_rank(trainer).shard_media and one_rank(trainer).first_stage_layers is None


def faults(parallel: ParallelConfig, shape: LayoutShape = MIXTURE, *, ranks: int | None = None) -> list[str]:
    ranks = world_size(parallel) if ranks is None else ranks
    return [
        *rank_faults(parallel, ranks=ranks, ranks_key="placement.roles.actor"),
        *combination_faults(parallel),
        *switch_faults(parallel),
        *model_faults(parallel, shape),
        *trainer_faults(parallel, shape),
    ]


# -- Ranks ------------------------------------------------------------------------------------------------------------
@settings(max_examples=60, deadline=None)  # the first process imports Megatron
@given(**{size: st.integers(1, most) for size, most in SIZES.items()})
def test_ranks_stand_where_megatron_puts_them(tp: int, pp: int, cp: int, dp: int, ep: int, etp: int) -> None:
    from megatron.core.parallel_state import RankGenerator

    parallel = layout(tp=tp, pp=pp, cp=cp, dp=dp, ep=ep, etp=etp)
    ranks = world_size(parallel)
    order = "tp-cp-ep-dp-pp"
    dense = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    for size in ("tp", "cp", "dp", "pp"):
        assert places(ranks, dense.get_ranks(size)) == [
            getattr(rank_coordinates(parallel, rank), size) for rank in range(ranks)
        ]
    assert sorted(map(sorted, dense.get_ranks("tp-cp-pp"))) == sorted(replica_ranks(parallel))
    if ep == etp == 1:
        assert sorted(map(sorted, dense.get_ranks("dp"))) == sorted(equal_ranks(parallel))
    if tp * cp * dp % (ep * etp) == 0:
        experts = RankGenerator(tp=etp, ep=ep, dp=tp * cp * dp // (ep * etp), pp=pp, cp=1, order=order)
        assert places(ranks, experts.get_ranks("ep")) == [rank_coordinates(parallel, rank).ep for rank in range(ranks)]
        assert places(ranks, experts.get_ranks("tp")) == [rank_coordinates(parallel, rank).etp for rank in range(ranks)]


def test_ranks_with_different_experts_are_not_equal() -> None:
    assert equal_ranks(layout(dp=4, ep=2)) == [[0, 2], [1, 3]]
    assert equal_ranks(layout(dp=2, ep=2)) == [[0], [1]]
    assert equal_ranks(layout(dp=2, tp=2, pp=2)) == [[0, 2], [1, 3], [4, 6], [5, 7]]


def places(ranks: int, groups: list[list[int]]) -> list[int]:
    """Returns each rank's index in its group."""
    found = {rank: place for group in groups for place, rank in enumerate(group)}
    return [found[rank] for rank in range(ranks)]


def test_another_roles_layout_has_the_trainers_other_settings() -> None:
    trainer = dataclasses.replace(
        layout(tp=2, pp=2, vpp=2, dp=2), micro_batch_tokens=77, distributed_optimizer=True, overlap=True
    )
    forward = forward_parallel(trainer, ForwardLayout(dp=3, tp=2, pp=1, ep=2))
    assert (forward.dp, forward.tp, forward.pp, forward.ep, forward.vpp) == (3, 2, 1, 2, 1)
    assert forward.sequence_parallel and not forward.overlap and not forward.distributed_optimizer
    alone = one_rank(trainer)
    assert world_size(alone) == 1 and alone.micro_batch_tokens == 77 and not alone.sequence_parallel


# -- Refused layouts ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "sizes",
    [{"tp": 4, "pp": 2, "ep": 4}, {"tp": 4, "ep": 8, "dp": 2}, {"tp": 2, "dp": 4}, {"pp": 4, "vpp": 6}, {}],
)
def test_layouts_that_hold(sizes: dict[str, int]) -> None:
    assert faults(layout(**sizes)) == []


@pytest.mark.parametrize(
    ("sizes", "text"),
    [
        (
            {"tp": 3},
            "parallel.tp=3 does not divide the model's 32 attention heads, 4 key-value heads, 2048 hidden units.",
        ),
        ({"tp": 8}, "parallel.tp=8 does not divide the model's 4 key-value heads. Use parallel.tp=1, 2 or 4."),
        ({"pp": 5}, "parallel.pp=5 does not divide the model's 48 layers. Use parallel.pp=1, 2, 3, 4 or 6."),
        (
            {"pp": 4, "vpp": 5},
            "= 20 does not divide the model's 48 layers. Use parallel.vpp=1, 2, 3, 4 or 6.",
        ),
        ({"vpp": 2}, "parallel.vpp=2 with parallel.pp=1: there are no stages to interleave. Set parallel.vpp=1."),
        ({"ep": 3, "dp": 3}, "parallel.ep=3 does not divide the model's 128 experts. Use parallel.ep=1, 2 or 4."),
        ({"ep": 8, "dp": 4}, "parallel.ep=8 x etp=1 does not divide the tp x cp x dp = 4 ranks of a pipeline stage."),
        ({"etp": 5, "dp": 5}, "parallel.etp=5 does not divide the model's 768 hidden units of an expert."),
    ],
)
def test_a_fault_names_key_value_and_fix(sizes: dict[str, int], text: str) -> None:
    assert any(text in fault for fault in faults(layout(**sizes)))


@pytest.mark.parametrize("size", range(2, 9))
@pytest.mark.parametrize("key", ["tp", "pp", "ep", "etp"])
def test_every_size_that_a_fix_names_divides_all_of_the_model(key: str, size: int) -> None:
    """The shape has 9 heads and 3 key-value heads, like SmolLM2-135M. The first 3 of 30 layers add a tower's rows."""
    shape = LayoutShape(
        layers=30,
        heads=9,
        kv_heads=3,
        linear_heads=0,
        experts=60,
        expert_width=48,
        widths={"hidden units": 1536},
        deepstack_layers=3,
    )
    found = list(model_faults(layout(sequence_parallel=None, **{key: size}), shape))
    if size in {"tp": (3,), "pp": (2, 3, 5, 6), "ep": (2, 3, 4, 5, 6), "etp": (2, 3, 4, 6, 8)}[key]:
        assert found == []
        return
    (named,) = re.findall(rf"Use parallel.{key}=(.*)\.", " ".join(found))
    sizes = [int(part) for part in re.split(", | or ", named)]
    assert sizes[0] == 1 and all(
        not list(model_faults(layout(sequence_parallel=None, **{key: proposed}), shape)) for proposed in sizes
    )
    assert sizes[-1] > size or {"tp": 3, "pp": 10}[key] == sizes[-1], "a larger size is named, if there is one"


def test_no_size_above_the_number_of_gpus_is_named() -> None:
    shape = dataclasses.replace(DENSE, heads=9, kv_heads=3, widths={"hidden units": 1536})
    for gpus, named in ((None, "1 or 3"), (4, "1 or 3"), (2, "1")):
        (found,) = model_faults(layout(tp=2), shape, most=gpus)
        message = "parallel.tp=2 does not divide the model's 9 attention heads, 3 key-value heads."
        assert found == f"{message} Use parallel.tp={named}."


def test_a_layout_fills_its_gpus() -> None:
    message = "= 4 ranks, but there are GPUs for 8. Set parallel.dp=4 or placement.roles.actor=4."
    assert message in faults(layout(tp=2, dp=2), ranks=8)[0]
    assert "Set placement.roles.actor=3." in faults(layout(tp=3), ranks=2)[0]


def test_a_dense_model_has_no_experts_to_spread() -> None:
    message = "parallel.ep=2, parallel.etp=1: the model has no experts. Set parallel.ep=1 parallel.etp=1."
    assert faults(layout(ep=2, dp=2), DENSE) == [message]


def test_switches_that_do_not_go_together() -> None:
    assert "parallel.tp=1: there is no other rank to share rows with" in faults(layout(sequence_parallel=True))[0]
    assert "Set parallel.sequence_parallel=true." in faults(layout(tp=2, sequence_parallel=False))[0]
    assert faults(layout(tp=2, sequence_parallel=False), DENSE) == []
    overlapping = dataclasses.replace(layout(dp=2), overlap=True)
    assert "Set parallel.distributed_optimizer=true." in faults(overlapping)[0]


@settings(max_examples=200)
@given(
    **{size: st.integers(1, 9) for size in ("tp", "pp", "vpp", "cp", "dp", "ep", "etp")},
    first=st.none() | st.integers(1, 50),
    dealt=st.booleans(),
)
def test_following_the_fixes_ends_with_a_layout_that_holds(
    tp: int, pp: int, vpp: int, cp: int, dp: int, ep: int, etp: int, first: int | None, dealt: bool
) -> None:
    parallel = layout(tp=tp, pp=pp, vpp=vpp, cp=cp, dp=dp, ep=ep, etp=etp)
    parallel = dataclasses.replace(parallel, first_stage_layers=first, shard_media=dealt)
    ranks = tp * pp * cp * dp
    for _ in range(30):
        found = faults(parallel, ranks=ranks)
        if not found:
            break
        fix = re.search(r"(?:Set|Use) ((?:(?:parallel|placement\.roles)\.\w+=\w+ ?)+)", found[0])
        assert fix is not None, found[0]
        for key, value in (setting.split("=") for setting in fix[1].split()):
            if key == "placement.roles.actor":
                ranks = int(value)
            else:
                setattr(parallel, key.removeprefix("parallel."), READ.get(value, int)(value))
    assert faults(parallel, ranks=ranks) == []
    assert world_size(parallel) == ranks


READ: dict[str, Callable[[str], int | bool | None]] = {
    "true": lambda _: True,
    "false": lambda _: False,
    "null": lambda _: None,
}
