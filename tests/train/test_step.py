"""Tests inputs that must not change a train step, and faults that must stop a train step."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, make_model
from tiny_trainer import PPO_CLIP, dp_groups, make_backend, make_groups, parallel_config, train_step

from relax_core.config.choices import Schedule
from relax_core.config.learning_rate_schedule import learning_rate
from relax_core.config.schema import OptimizerConfig
from relax_core.contracts.algorithm import LossInputs, LossOutputs, Requirements
from tests.train.rank_server import run_dp_ranks
from tests.trees import answer_ids, of_tokens, with_tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def weights(backend: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.export()}


def assert_same_weights(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], atol=1e-6, rtol=0, msg=name)


def test_a_rank_that_leaves_is_named(folder: Path, tmp_path: Path) -> None:
    (status, error), (other_status, _) = run_dp_ranks(folder, tmp_path / "two", steps=[2, 1])
    assert status == 1 and other_status == 0
    assert "train step 1: trainer rank 0 waited up to 300 s for the other ranks:" in error
    assert "Ranks 1 failed" in error


def test_a_rank_that_never_comes_is_waited_for_only_so_long(folder: Path, tmp_path: Path) -> None:
    ((status, error),) = run_dp_ranks(folder, tmp_path / "two", steps=[1], timeout_s=1.0)
    assert status == 1
    assert "TimeoutError: trainer rank 0 waited 1 s at 127.0.0.1:" in error
    assert "for all 2 ranks" in error


def test_the_gap_counts_fresh_trained_tokens_only(folder: Path) -> None:
    backend = make_backend(folder)
    (group,) = make_groups([[6, 4]], prompt_lengths=[5])
    rollout = of_tokens(group, backend.logprobs([group])[0])
    rollout[[1, 4, 8]] += [0.25, 0.5, 1.0]
    mask, on_policy = np.ones(10, dtype=bool), np.ones(10, dtype=bool)
    on_policy[4] = False
    mask[8] = False
    metrics = train_step(backend, [[with_tokens(group, logprobs=rollout, loss_mask=mask, on_policy=on_policy)]])
    assert metrics.logprob_gap_tokens == 8
    assert metrics.logprob_gap_max == pytest.approx(0.25, abs=1e-5)
    assert metrics.logprob_gap_mean == pytest.approx(0.25 / 8, abs=1e-5)
    assert metrics.tokens == 9


def test_samples_and_groups_without_trained_tokens_are_not_counted(folder: Path) -> None:
    totals = []
    spec = dataclasses.replace(PPO_CLIP, denominator=lambda total, config: totals.append(total) or 1.0)
    first, second = make_groups([[2, 3], [4, 4]], prompt_lengths=[5, 5])
    masked = with_tokens(first, loss_mask=[False, False, True, False, True])
    gone = with_tokens(second, loss_mask=[False] * 8)
    train_step(make_backend(folder, algorithm=spec), [[masked, gone]])
    assert (totals[0].tokens, totals[0].samples, totals[0].groups) == (2, 1, 1)


def test_a_broken_gradient_stops_before_the_update(folder: Path) -> None:
    def explode(inputs: LossInputs, config: Any) -> LossOutputs:
        return LossOutputs(loss_sum=inputs.logprobs.sum() * math.inf)

    backend = make_backend(folder, algorithm=dataclasses.replace(PPO_CLIP, loss=explode))
    before = weights(backend)
    message = (
        r"train step 3: the gradient is not finite on rank\(s\) \[0\]; the first such tensor is model.embed_tokens"
    )
    with pytest.raises(FloatingPointError, match=message):
        train_step(backend, [make_groups([[3]], prompt_lengths=[5])], step=3)
    assert all(torch.equal(tensor, before[name]) for name, tensor in backend.export())


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        *(f"model.layers.0.self_attn.{part}_proj.weight" for part in "qkv"),
        *(f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
        "model.norm.weight",
    ],
)
def test_the_first_tensor_that_is_not_finite_is_named(folder: Path, name: str) -> None:
    """Megatron stores query, key and value in one parameter, and gate and up in one parameter."""
    backend = make_backend(folder)
    backend.begin_step(4)
    backend.accumulate(make_groups([[3]], prompt_lengths=[5]))
    for _, tensor_name, gradient in backend._weights.parts(lambda parameter: parameter.main_grad):
        if tensor_name in (name, "model.norm.weight"):  # a later tensor also contains non-finite numbers
            gradient[(-1,) * gradient.ndim] = math.inf
    with pytest.raises(FloatingPointError, match=rf"train step 4: .*; the first such tensor is {name};"):
        backend.finish_step()


def test_a_loss_that_is_not_finite_ends_the_step(folder: Path) -> None:
    """The step fails even if all gradients are finite."""

    def endless(inputs: LossInputs, config: Any) -> LossOutputs:
        return LossOutputs(loss_sum=inputs.logprobs.sum() + math.inf)

    backend = make_backend(folder, algorithm=dataclasses.replace(PPO_CLIP, loss=endless))
    with pytest.raises(FloatingPointError, match="train step 5: the loss sum is inf, though every gradient is finite"):
        train_step(backend, [make_groups([[3]], prompt_lengths=[5])], step=5)


@pytest.mark.parametrize("overlap", [False, True])
def test_an_update_that_breaks_the_weights_ends_before_they_are_published(folder: Path, overlap: bool) -> None:
    """With overlap, ranks gather an update's weights only at the next read of the weights."""
    parallel = parallel_config(distributed_optimizer=overlap, overlap=overlap)
    groups = [make_groups([[3]], prompt_lengths=[5])]
    huge = make_backend(folder, optimizer={"lr": 1e37}, parallel=parallel)
    train_step(huge, groups)
    # This step makes huge but finite weights, so it is not refused.
    assert max(float(tensor.abs().max()) for _, tensor in huge.export()) > 1e36
    backend = make_backend(folder, optimizer={"lr": 1e30, "weight_decay": 1e10}, parallel=parallel)
    message = (
        "train step 6: its update made weights that are not finite on rank 0; the first such tensor is model.embed"
    )

    def step_then_export() -> None:
        train_step(backend, groups, step=6)
        list(backend.export())

    with pytest.raises(FloatingPointError, match=message):
        step_then_export()


def test_weights_that_were_broken_before_are_named_as_the_cause(folder: Path) -> None:
    backend = make_backend(folder)
    broken = "model.layers.1.mlp.up_proj.weight"
    with torch.no_grad():
        weight = next(part for _, name, part in backend._weights.parts(torch.Tensor.detach) if name == broken)
        weight[0, 0] = math.nan
    message = rf"train step 7: .*; the first tensor with weights that are not finite is {broken}; loss sum nan"
    with pytest.raises(FloatingPointError, match=message):
        train_step(backend, [make_groups([[3]], prompt_lengths=[5])], step=7)


def test_old_and_reference_logprobs_reach_the_loss(folder: Path) -> None:
    seen: list[LossInputs] = []

    def spy(inputs: LossInputs, config: Any) -> LossOutputs:
        seen.append(inputs)
        return PPO_CLIP.loss(inputs, config)

    groups = make_groups([[2, 3], [1]], prompt_lengths=[5, 2])
    old, reference = (
        [np.full(int(g.lengths.sum()), value, dtype=np.float32) for g in groups] for value in (-1.0, -2.0)
    )
    full = [
        with_tokens(g, old_logprobs=o, reference_logprobs=r) for g, o, r in zip(groups, old, reference, strict=True)
    ]
    backend = make_backend(folder, algorithm=dataclasses.replace(PPO_CLIP, loss=spy))
    train_step(backend, [groups])
    train_step(backend, [full])
    assert torch.equal(seen[0].old_logprobs, seen[0].rollout_logprobs)
    assert seen[0].reference_logprobs is None
    assert seen[1].old_logprobs.tolist() == [-1.0] * 6
    assert seen[1].reference_logprobs is not None
    assert seen[1].reference_logprobs.tolist() == [-2.0] * 6
    assert seen[0].sample_ids.tolist() == [0, 0, 1, 1, 1, 2]
    assert seen[0].num_samples == 3


def test_entropy_and_the_teachers_tokens_reach_the_loss_with_their_gradient(folder: Path) -> None:
    """Compares with the full distribution of the model in the folder."""
    seen: list[LossInputs] = []

    def loss(inputs: LossInputs, config: Any) -> LossOutputs:
        seen.append(inputs)
        assert inputs.entropy is not None and inputs.top_logprobs is not None
        return LossOutputs(loss_sum=inputs.entropy.sum() + inputs.top_logprobs.sum())

    (group,) = make_groups([[2, 3]], prompt_lengths=[5])
    top_ids = np.arange(15, dtype=np.int32).reshape(5, 3)
    group = with_tokens(
        group,
        teacher_logprobs=np.full(5, -1.5, dtype=np.float32),
        teacher_top_ids=top_ids,
        teacher_top_logprobs=np.full((5, 3), -2.5, dtype=np.float32),
    )
    requirements = Requirements(old_logprobs="rollout", entropy=True)
    backend = make_backend(
        folder, algorithm=dataclasses.replace(PPO_CLIP, loss=loss, requirements=lambda config: requirements)
    )
    whole = backend.top_logprobs([group], top_k=VOCABULARY)[0]
    ordered = np.take_along_axis(whole.top_logprobs, whole.top_ids.argsort(axis=1), axis=1)[group.sampled]
    train_step(backend, [[group]])
    (inputs,) = seen
    assert inputs.entropy is not None and inputs.top_logprobs is not None
    np.testing.assert_allclose(inputs.entropy.detach().cpu(), -(np.exp(ordered) * ordered).sum(axis=1), atol=1e-5)
    np.testing.assert_allclose(
        inputs.top_logprobs.detach().cpu(), np.take_along_axis(ordered, top_ids, axis=1), atol=1e-5
    )
    np.testing.assert_allclose(inputs.logprobs.detach().cpu(), ordered[np.arange(5), answer_ids(group)], atol=1e-5)
    assert inputs.entropy.requires_grad and inputs.top_logprobs.requires_grad
    assert inputs.teacher_logprobs is not None and inputs.teacher_logprobs.tolist() == [-1.5] * 5
    assert inputs.teacher_top_logprobs is not None and inputs.teacher_top_logprobs.shape == (5, 3)


def test_the_top_k_tokens_are_cut_by_group(folder: Path) -> None:
    backend, groups = make_backend(folder), make_groups([[2, 3], [4]], prompt_lengths=[5, 7])
    found = backend.top_logprobs(groups, top_k=4)
    assert [scores.top_ids.shape for scores in found] == [(5 + 5, 4), (7 + 4, 4)]
    for scores, plain in zip(found, backend.logprobs(groups), strict=True):
        np.testing.assert_allclose(scores.logprobs, plain, atol=1e-6)
        assert (np.diff(scores.top_logprobs, axis=1) <= 0).all()


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        (Schedule.constant, [0.25, 0.5, 0.75, 1.0, 1.0, 1.0, 1.0]),
        (Schedule.cosine, [0.25, 0.5, 0.75, 1.0, 1.0, 0.1 + 0.9 * (0.5 + math.sqrt(2) / 4), 0.55]),
        (Schedule.linear, [0.25, 0.5, 0.75, 1.0, 1.0, 0.775, 0.55]),
    ],
)
def test_learning_rate(schedule: Schedule, expected: list[float]) -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, schedule=schedule, warmup_steps=4)
    assert [learning_rate(config, step=step, total_steps=8) for step in range(7)] == pytest.approx(expected)


@pytest.mark.parametrize(("steps", "warmup"), [(320, 10), (10, 10), (4, 4), (1, 1)])
def test_the_default_warm_up_is_no_longer_than_the_run(steps: int, warmup: int) -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, schedule=Schedule.constant, warmup_steps=None)
    rates = [learning_rate(config, step=step, total_steps=steps) for step in range(warmup)]
    assert rates == pytest.approx([(step + 1) / warmup for step in range(warmup)])


def test_a_schedule_that_goes_down_ends_where_it_says() -> None:
    for schedule in (Schedule.cosine, Schedule.linear):
        config = OptimizerConfig(lr=2.0, min_lr_ratio=0.25, schedule=schedule, warmup_steps=3)
        rates = [learning_rate(config, step=step, total_steps=50) for step in range(60)]
        assert rates[50:] == pytest.approx([0.5] * 10)
        assert rates[3:51] == sorted(rates[3:51], reverse=True)


def test_bfloat16_trains(folder: Path) -> None:
    """Log-probs are close to float32 log-probs, and an update of the float32 copy changes the bfloat16 weights."""
    plain, half = make_backend(folder), make_backend(folder, dtype="bfloat16")
    groups = dp_groups()[0]
    np.testing.assert_allclose(
        np.concatenate(half.logprobs(groups)), np.concatenate(plain.logprobs(groups)), atol=0.15, rtol=0
    )
    before = weights(half)
    metrics = train_step(half, [groups])
    assert metrics.grad_norm == pytest.approx(train_step(plain, [groups]).grad_norm, rel=0.1)
    after = weights(half)
    assert all(tensor.dtype == torch.bfloat16 for tensor in after.values())
    assert any(not torch.equal(before[name], tensor) for name, tensor in after.items())


@pytest.mark.parametrize("sharded", [False, True])
def test_updates_smaller_than_a_step_of_bfloat16_are_not_lost(folder: Path, sharded: bool) -> None:
    """Summed over all weights, the first update has the same size as in float32, because the folder is float32."""
    groups = [make_groups([[6, 4]], prompt_lengths=[5])]
    moved = {}
    for dtype in ("float32", "bfloat16"):
        backend = make_backend(folder, dtype=dtype, distributed_optimizer=sharded, optimizer={"lr": 1e-5})
        before = weights(backend)
        train_step(backend, groups)
        moved[dtype] = torch.cat(
            [(tensor.float() - before[name].float()).flatten() for name, tensor in backend.export()]
        )
    wanted = moved["float32"]
    assert 0 < float(wanted.abs().max()) < 2e-5
    assert float((moved["bfloat16"] * wanted.sign()).sum() / wanted.abs().sum()) == pytest.approx(1.0, abs=0.2)


def test_a_forward_only_back_end_takes_published_weights(folder: Path, tmp_path: Path) -> None:
    make_model(tmp_path, seed=1)
    trainer, reader = make_backend(folder), make_backend(tmp_path, trainable=False)
    groups = dp_groups()[0]
    assert not np.allclose(reader.logprobs(groups)[0], trainer.logprobs(groups)[0])
    reader.load_weights(trainer.export())
    np.testing.assert_array_equal(reader.logprobs(groups)[0], trainer.logprobs(groups)[0])
    assert reader.optimizer is None
    assert not any(parameter.requires_grad for parameter in reader.model.parameters())
