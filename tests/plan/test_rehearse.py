"""`plan=rehearse`: bytes against values derived by hand, extrapolation, and the plan's formulas against rehearsals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.__main__ import main
from relax_core.config.compose import compose, typed_config
from relax_core.config.schema import RelaxConfig
from relax_core.plan.build_plan import make_plan
from relax_core.plan.gpu_terms import trainer_phases
from relax_core.plan.model_dimensions import ModelDimensions, find_dimensions
from relax_core.plan.rehearsal_child import Job
from relax_core.plan.rehearse import as_json_values, as_text, find_depths, rehearse, run_jobs
from relax_core.plan.rehearsed_step import largest_micro_batch
from relax_core.plan.step_time import message_bytes, pass_flops, rows_of_trees
from relax_core.plan.workload import Workload
from relax_core.train.rehearsal.counts import (
    EMBEDDING,
    HEAD_BACKWARD,
    LAYERS,
    LAYERS_BACKWARD,
    ONCE,
    OPTIMIZER,
    Counts,
    extrapolated,
)

PRESETS = sorted(file.stem for file in Path("conf/experiment").resolve().glob("*_*gpu.yaml"))
ONE_GPU = ("placement=gpu", "placement.gpus_per_node=1", "+placement.roles.actor=1", "engine=embedded")
WITHIN = 0.03
GRAIN, FLOAT, BFLOAT16 = 512, 4, 2
READS = 10  # most host reads of an update beside those of the routing, two for each layer and micro-batch


def planned(*overrides: str) -> RelaxConfig:
    return typed_config(compose(overrides))


def rounded(*elements: int) -> int:
    """The bytes of float32 tensors, each a multiple of 512."""
    return sum(-(-count * FLOAT // GRAIN) * GRAIN for count in elements)


def check_reads(counts: Counts, *, routed_passes: int = 0) -> None:
    """Each read waits until the device has no more work: only routing reads in a pass, and an update a few times."""
    reads = dict(counts.host_reads)
    assert reads.pop(LAYERS, 0) <= 2 * routed_passes, counts.host_reads
    assert set(reads) <= set(ONCE) and sum(reads.values()) <= READS, counts.host_reads


def check_export(counts: Counts, model: ModelDimensions, *, receives: bool) -> None:
    """An export holds at most two buckets in addition to the state. A bucket has 64 MiB, or one larger tensor."""
    tensors = [model.vocabulary * model.hidden]
    if model.experts is not None:  # all experts of a layer, with gate and up, in one stored tensor
        tensors.append(2 * model.hidden * model.experts.count * model.experts.width)
    bucket = max(64 << 20, BFLOAT16 * max(tensors))
    assert counts.published <= 2 * bucket, (counts.published, bucket)
    assert (counts.published >= BFLOAT16 * tensors[0]) is receives, "rank 0 gathers the embedding from all tp ranks"


def test_a_tiny_rank_by_hand_and_a_long_one_from_two_short_ones() -> None:
    """Hidden 64, query 64, key 32, feed-forward 192, heads of 16; 12 layers from 1 and 3."""
    config = planned(*ONE_GPU)
    plan = make_plan(config)
    model, long = plan.model, 12
    jobs = [
        Job(rank=0, layers=layers, micro_batches=2, whole=long, template=one) for layers, one in ((1, None), (3, 1))
    ]
    short, longer, whole = run_jobs(config, plan.work, [*jobs, Job(rank=0, layers=long, micro_batches=2, whole=long)])
    hidden, wide, query, key, head = model.hidden, model.feed_forward, model.query, model.key, model.head_dim
    layer = [hidden, hidden, (query + 2 * key) * hidden, hidden * query, head, head, 2 * wide * hidden, wide * hidden]
    tensors = [model.vocabulary * hidden, *(layer * long), hidden]
    assert whole.rows == [plan.work.micro_batch_rows] * 2
    assert whole.state["weights"] == rounded(*tensors)
    assert whole.state["Adam states"] == 2 * rounded(*tensors) + GRAIN * len(tensors)  # the step of each tensor
    assert whole.state["gradients"] == pytest.approx(sum(tensors) * FLOAT, abs=GRAIN)
    found = extrapolated(short, longer, layers=long)
    assert found.peak.phase == whole.peak.phase
    assert found.peak.bytes == pytest.approx(whole.peak.bytes, abs=4 * GRAIN)  # one buffer has all gradients
    assert (found.flops, found.operators, found.host_reads) == (whole.flops, whole.operators, whole.host_reads)
    assert found.messages == whole.messages
    check_reads(whole)
    assert found.reserved == pytest.approx(whole.reserved, rel=0.01)


@pytest.mark.parametrize(
    ("preset", "layers", "ranks"), [("qwen3_4b_async_8gpu", 2, (0,)), ("qwen3_30b_a3b_async_16gpu", 2, (0, 4))]
)
def test_the_formulas_are_what_a_short_model_allocates(preset: str, layers: int, ranks: tuple[int, ...]) -> None:
    """Most of the memory of a short model is the head's, so each error of the head and of the state is seen."""
    config = planned(f"experiment={preset}")
    plan = make_plan(config)
    model = replace(plan.model, layers=layers)
    jobs = [Job(rank=rank, layers=layers, micro_batches=config.parallel.pp) for rank in ranks]
    found: list[Counts] = []
    for stage, counts in enumerate(run_jobs(config, plan.work, jobs)):
        phases = trainer_phases(config, model, plan.work, stage=stage)
        formula = max(sum(terms.values()) for terms in phases.values())
        assert formula == pytest.approx(counts.peak.bytes, rel=WITHIN), (stage, counts.peak, phases)
        routed = 0 if model.experts is None else counts.layers * len(counts.rows)
        check_reads(counts, routed_passes=routed)
        check_export(counts, model, receives=stage == 0)
        found.append(counts)
    _check_work(config, model, plan.work, found)


def test_states_on_the_host_are_on_the_device_by_buckets() -> None:
    """With two layers the peak of the update is the embedding's bucket, and both models' state has no Adam states."""
    config = planned("experiment=qwen3_1_7b_24gb_1gpu")
    plan = make_plan(config)
    model = replace(plan.model, layers=2)
    (counts,) = run_jobs(config, plan.work, [Job(rank=0, layers=2, micro_batches=1)])
    phases = trainer_phases(config, model, plan.work, stage=0)
    for phase, name in ((HEAD_BACKWARD, "head"), (OPTIMIZER, "optimizer")):
        peak = max(section.bytes for section in counts.sections if section.phase == phase)
        assert sum(phases[name].values()) == pytest.approx(peak, rel=WITHIN), name
    steps = GRAIN * (8 * 2 + 2)  # a counter for each parameter
    assert counts.state["Adam states"] == steps
    assert max(section.by_category.get("Adam states", 0) for section in counts.sections) == steps
    check_reads(counts)


def _check_work(config: RelaxConfig, model: ModelDimensions, work: Workload, stages: list[Counts]) -> None:
    """Compares operations and messages of one micro-batch for each stage with the formulas of the step's seconds."""
    parallel = config.parallel
    step = rows_of_trees(largest_micro_batch(config, work, None), micro_batches=parallel.pp)
    of_layers = replace(model, row_products=model.row_products * model.layers // find_dimensions(config).layers)
    flops = parallel.tp * sum(sum(counts.flops.values()) for counts in stages)
    assert pass_flops(of_layers, step, trained=True) == pytest.approx(flops, rel=WITHIN)
    sent = message_bytes(model, replace(parallel, dp=1), step, trained=True)  # the rows of one replica
    first = [message for message in stages[0].messages if message.phase in (LAYERS, LAYERS_BACKWARD)]
    for group, planned_bytes in (("TENSOR_MODEL", sent.tensor), ("EXPERT_MODEL", sent.expert)):
        of_group = sum(message.bytes for message in first if message.group.startswith(group))
        assert planned_bytes == pytest.approx(of_group, rel=0.06), group  # the head gathers its input in `LAYERS`


@pytest.mark.soak
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_within_three_percent_and_fits(preset: str) -> None:
    config = planned(f"experiment={preset}")
    rehearsal = rehearse(config, make_plan(config))
    for rank in rehearsal.ranks:
        assert rank.planned == pytest.approx(rank.counts.peak.bytes, rel=WITHIN), as_text(rehearsal)
    assert rehearsal.fits, as_text(rehearsal)
    assert json.dumps(as_json_values(rehearsal))


def test_the_blocks_of_a_tower_do_not_read_the_device() -> None:
    config = planned(*ONE_GPU, "model=tiny_qwen3_vl", "data=see")
    plan = make_plan(config)
    (counts,) = run_jobs(config, plan.work, [Job(rank=0, layers=plan.model.layers, micro_batches=2)])
    assert counts.flops[EMBEDDING], "the tower computes"
    check_reads(counts)


def test_the_depths_of_short_models() -> None:
    """Whole periods of kinds of layers, and the first layers with outputs of the tower."""
    for preset, short, template in (
        ("qwen3_4b_async_8gpu", (1, 3), 1),
        ("qwen3_5_9b_async_8gpu", (4, 12), 1),
        ("qwen3_vl_4b_async_8gpu", (3, 6), 4),
    ):
        config = planned(f"experiment={preset}")
        depths = find_depths(config, make_plan(config).model)
        assert (depths.short, depths.template) == (short, template), preset


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ((), ("placement.gpus_per_node=0", "Add placement=gpu")),
        ((*ONE_GPU, "rollout.top_p=0.9"), ("rollout.top_p=0.9", "the kept sets")),
        (("experiment=qwen3_4b_async_8gpu", "parallel.tp=3"), ("parallel.tp=3", "Use parallel.tp=1, 2 or 4")),
        (
            ("experiment=qwen3_5_9b_async_8gpu", "parallel.pp=16", "placement.roles.actor=64", "placement.nodes=9"),
            ("parallel.pp=16", "the kinds of layers repeat every 4"),
        ),
    ],
)
def test_what_cannot_be_rehearsed_is_told(
    overrides: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan=rehearse", *overrides]) == 1
    told = capsys.readouterr().err
    for word in words:
        assert word in told, told
    assert "Traceback" not in told
