"""The estimate of a step's seconds: against sums derived by hand, and against published step times."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks.step_time import FITTED, estimate
from relax_core.__main__ import main
from relax_core.config.choices import GpuName
from relax_core.config.schema import ParallelConfig
from relax_core.plan.gpu_models import GPU_MODELS, GpuModel
from relax_core.plan.model_dimensions import shape_dimensions
from relax_core.plan.step_time import (
    Efficiency,
    Engines,
    Rows,
    batch_rollout_seconds,
    decode_step_seconds,
    message_bytes,
    pass_flops,
    pass_seconds,
    steady_rollout_seconds,
)

DENSE, EXPERTS = shape_dimensions("Qwen3-4B"), shape_dimensions("Qwen3-30B-A3B")
IDEAL = Efficiency(dense=1, experts=1, decode=1, memory=1, link=1, layer_s=0, message_s=0, step_s=0)
SLOW_MEMORY = GpuModel(memory_gib=1, flops=1e30, bandwidth=1.0, link=1e30, host=1, network=1, source="")
SLOW_PRODUCTS = GpuModel(memory_gib=1, flops=1.0, bandwidth=1e30, link=1e30, host=1, network=1e30, source="")
ONE_ENGINE = Engines(count=1, tp=1, max_running=64)


def layout(*, dp: int = 1, tp: int = 1, pp: int = 1, ep: int = 1, vpp: int = 1) -> ParallelConfig:
    return ParallelConfig(dp=dp, tp=tp, pp=pp, vpp=vpp, cp=1, ep=ep, etp=1, sequence_parallel=tp > 1)


def rows(total: float = 1024, *, keys: float = 0, head: float = 0, micro_batches: float = 4) -> Rows:
    return Rows(total=total, keys=keys, head=head, micro_batches=micro_batches)


@pytest.mark.parametrize("model", [DENSE, EXPERTS])
def test_a_train_step_has_six_operations_for_each_active_weight_and_row(model) -> None:
    """Kaplan et al. (2020), equation 2.2: norms are no products, and inactive experts compute nothing."""
    active = model.layer_parameters
    if model.experts is not None:
        active += model.expert_parameters * model.experts.per_token / model.experts.count
    assert pass_flops(model, rows(), trained=True) == pytest.approx(6 * active * 1024, rel=1e-3)
    assert pass_flops(model, rows(), trained=False) == pytest.approx(2 * active * 1024, rel=1e-3)
    assert pass_flops(model, rows(), trained=True, recompute=True) == pytest.approx(8 * active * 1024, rel=1e-3)


def test_the_ranks_share_the_operations_and_a_pipeline_is_idle_at_its_ends() -> None:
    alone = pass_seconds(DENSE, SLOW_PRODUCTS, layout(), rows(), gpus_per_node=8, trained=False, efficiency=IDEAL)
    assert alone.total == pytest.approx(pass_flops(DENSE, rows(), trained=False))
    staged = pass_seconds(
        DENSE, SLOW_PRODUCTS, layout(dp=2, pp=4), rows(), gpus_per_node=8, trained=False, efficiency=IDEAL
    )
    assert staged.compute == pytest.approx(alone.compute / 8)
    assert staged.idle == pytest.approx(staged.compute * 3 / 4)  # 3 of 4 stages wait for the first of 4 micro-batches
    chunks = pass_seconds(
        DENSE, SLOW_PRODUCTS, layout(dp=2, pp=4, vpp=3), rows(), gpus_per_node=8, trained=False, efficiency=IDEAL
    )
    assert chunks.idle == pytest.approx(staged.idle / 3)


def test_messages_by_hand() -> None:
    """A dense layer has two all-reduces, a layer with experts one and two all-to-alls."""
    message = 1024 * DENSE.hidden * 2
    forward = message_bytes(DENSE, layout(tp=4), rows(), trained=False)
    assert forward.tensor == 36 * 2 * 2 * 3 / 4 * message
    assert message_bytes(DENSE, layout(tp=4), rows(), trained=True).tensor == 2.5 * forward.tensor
    assert (forward.expert, message_bytes(DENSE, layout(dp=4), rows(), trained=True).tensor) == (0, 0)
    routed = message_bytes(EXPERTS, layout(tp=4, ep=4), rows(), trained=False)
    message = 1024 * EXPERTS.hidden * 2
    assert routed.tensor == 48 * 2 * 3 / 4 * message
    assert routed.expert == 48 * 2 * 8 * 3 / 4 * message / 4


def test_slow_links_are_those_between_machines() -> None:
    gpu = GPU_MODELS[GpuName.h100]
    sizes = layout(dp=8)
    near = pass_seconds(DENSE, gpu, sizes, rows(), gpus_per_node=8, trained=True, efficiency=IDEAL)
    far = pass_seconds(DENSE, gpu, sizes, rows(), gpus_per_node=4, trained=True, efficiency=IDEAL)
    gradients = 2 * 7 / 8 * 4 * DENSE.parameters
    assert far.update - near.update == pytest.approx(gradients / gpu.network - gradients / gpu.link)


def test_states_on_the_host_cross_the_bus_twice_in_each_update(capsys: pytest.CaptureFixture[str]) -> None:
    gpu, updates = replace(SLOW_PRODUCTS, flops=1e30, host=100.0), replace(rows(), updates=3)
    update = pass_seconds(
        DENSE, gpu, layout(), updates, gpus_per_node=8, trained=True, host_states=1000.0, efficiency=IDEAL
    ).update
    assert update == pytest.approx(3 * 2 * 1000 / 100)
    on_host, on_gpu = (
        {phase["name"]: phase["seconds"] for phase in shown(capsys, *line)["time"]["phases"]}
        for line in (
            ["experiment=qwen3_4b_48gb_1gpu"],
            ["experiment=qwen3_4b_48gb_1gpu", "optimizer.states=device", "placement.gpu_memory_gib=80"],
        )
    )
    # With one update in a step, the copies of an update replace those of a turn.
    assert on_host["train"] - on_gpu["train"] == pytest.approx(on_gpu["trainer state"] - on_host["trainer state"])
    assert on_gpu["trainer state"] == pytest.approx(7 * on_host["trainer state"])  # 14 and 2 bytes of a parameter


def test_a_decode_step_reads_the_weights_and_the_cache_once() -> None:
    step = decode_step_seconds(
        DENSE, SLOW_MEMORY, ONE_ENGINE, running=16, context=1000, gpus_per_node=8, efficiency=IDEAL
    )
    cache = 16 * 1000 * 36 * 2 * 8 * 128 * 2  # layers, keys and values, heads, head size, bytes
    assert step == pytest.approx(2 * DENSE.parameters + cache, rel=1e-3)  # tied embeddings: one matrix
    alone, many = (
        decode_step_seconds(
            EXPERTS, SLOW_MEMORY, ONE_ENGINE, running=running, context=0, gpus_per_node=8, efficiency=IDEAL
        )
        for running in (1, 10_000)
    )
    assert many - alone == pytest.approx(2 * EXPERTS.expert_parameters * (1 - 8 / 128), rel=1e-3)


def test_a_decode_step_of_many_samples_takes_its_operations() -> None:
    def seconds(running: int, tp: int) -> float:
        engines = replace(ONE_ENGINE, tp=tp)
        return decode_step_seconds(
            DENSE, SLOW_PRODUCTS, engines, running=running, context=0, gpus_per_node=8, efficiency=IDEAL
        )

    assert seconds(8, 1) == pytest.approx(2 * 8 * DENSE.parameters, rel=1e-3)
    assert seconds(8, 4) == pytest.approx(seconds(8, 1) / 4)


def test_a_rollout_waits_for_its_longest_response() -> None:
    fixed = replace(IDEAL, step_s=1.0)  # each decode step takes a second
    gpu = replace(SLOW_MEMORY, bandwidth=1e30)

    def together(samples: int, *, mean: float) -> float:
        return batch_rollout_seconds(
            DENSE,
            gpu,
            ONE_ENGINE,
            samples=samples,
            prompt=0,
            mean=mean,
            longest=96,
            gpus_per_node=8,
            efficiency=fixed,
        )

    assert together(64, mean=96) == pytest.approx(96)
    assert together(64, mean=24) == pytest.approx(96)  # the last sample is alone
    assert together(128, mean=96) == pytest.approx(2 * 96)  # one half waits for the other
    assert 96 < together(128, mean=24) < 1.5 * 96  # short ones make room
    steady = steady_rollout_seconds(
        DENSE, gpu, ONE_ENGINE, samples=128, running=64, prompt=0, mean=24, gpus_per_node=8, efficiency=fixed
    )
    assert steady == pytest.approx(128 * 24 / 64)


@pytest.mark.parametrize("row", FITTED, ids=lambda row: row.name)
def test_published_step_times_are_within_a_quarter(row) -> None:
    assert estimate(row).step == pytest.approx(row.seconds, rel=0.25)


def shown(capsys: pytest.CaptureFixture[str], *overrides: str) -> dict:
    main(["plan=json", *overrides])
    return json.loads(capsys.readouterr().out)


def test_the_plan_shows_the_seconds_of_a_step(capsys: pytest.CaptureFixture[str]) -> None:
    asynchronous = shown(capsys, "experiment=qwen3_4b_async_8gpu")["time"]
    times = {phase["name"]: phase["seconds"] for phase in asynchronous["phases"]}
    assert set(times) == {"rollout", "train", "actor_fwd", "reference", "weights"}
    assert asynchronous["seconds"] == pytest.approx(times["rollout"] + times["weights"]), "the longest, and weights"
    assert asynchronous["tokens"] == 64 * 8 * 1024
    slow_trainer = ("experiment=qwen3_4b_async_8gpu", "engine.count=6", "placement.roles={actor: 2, rollout: 6}")
    sequence = shown(capsys, *slow_trainer, "parallel.dp=1", "parallel.distributed_optimizer=false")["time"]
    times = {phase["name"]: phase["seconds"] for phase in sequence["phases"]}
    assert times["rollout"] < times["train"] and times["reference"] > times["actor_fwd"], "it exchanges weights"
    assert sequence["seconds"] == pytest.approx(sum(times.values()) - times["rollout"]), "the actor does one by one"
    alternating = shown(capsys, "experiment=qwen3_4b_80gb_1gpu")["time"]
    assert alternating["seconds"] == pytest.approx(sum(phase["seconds"] for phase in alternating["phases"]))
    slower = shown(capsys, "experiment=qwen3_4b_80gb_1gpu", "placement.gpu=a6000", "placement.gpu_memory_gib=79.2")
    assert slower["time"]["seconds"] > 2 * alternating["seconds"]


def test_a_gpu_gives_its_memory_and_an_unknown_one_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    whole = shown(capsys, "experiment=qwen3_4b_async_8gpu", "placement.gpu=h200")
    assert {holder["limit"] for holder in whole["memory"]} == {round(139.8 * 2**30)}
    other = shown(capsys, "experiment=qwen3_4b_async_8gpu", "placement.gpu=null", "placement.gpu_memory_gib=100")
    assert other["time"] is None and {holder["limit"] for holder in other["memory"]} == {100 << 30}
    assert shown(capsys)["time"] is None, "CPU cores"
    assert main(["plan=true", "placement=gpu", "placement.gpu=v100"]) != 0
    assert "placement.gpu=v100" in capsys.readouterr().err
    assert set(GPU_MODELS) == set(GpuName)
