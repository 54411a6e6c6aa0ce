"""Compares the critic with a value head on transformers' layers. Also tests its updates and its checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tiny_models import make_model
from tiny_trainer import dp_groups, make_critic, make_groups, train_step

from benchmarks.family_models import VARIANTS, make_family_model
from relax_core.contracts.tree import TokenTree
from relax_core.train.micro_batches import explained_variance, moment_sums
from tests.train.rank_server import run_dp_ranks
from tests.trees import answers_of, of_tokens, prompt_of

GROUPS = make_groups([[5, 1, 8, 3], [7, 7, 2, 4], [1, 1, 1, 1]], prompt_lengths=[9, 4, 1], masked=0.2)
CLIP = 0.2  # PPO clips values to this range


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model")
    make_model(path)
    return path


def parameters(critic: Any) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in critic.model.named_parameters()}


def set_head(critic: Any, seed: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """Sets a non-zero head and returns its weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    head = critic.model.value_head
    with torch.no_grad():
        head.weight.copy_(torch.randn(head.weight.shape, generator=generator))
        head.bias.fill_(0.3)
    critic.optimizer.reload_model_params()
    return head.weight.detach().cpu().clone(), head.bias.detach().cpu().clone()


def reference_values(model: Any, weight: torch.Tensor, bias: torch.Tensor, groups: list[TokenTree]) -> torch.Tensor:
    """Computes each sample in a separate forward pass: applies the head to the state before each response token."""
    parts = []
    for group in groups:
        prompt = prompt_of(group)
        for response in answers_of(group):
            sequence = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            hidden = model.model(sequence).last_hidden_state[0, len(prompt) - 1 : -1]
            parts.append((hidden @ weight.T + bias)[:, 0])
    return torch.cat(parts)


def column(arrays: list[Any]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays))


def values_of(critic: Any, groups: list[TokenTree]) -> np.ndarray:
    """Returns the values of all groups, ``[tokens]``."""
    return np.concatenate([of_tokens(group, own) for group, own in zip(groups, critic.values(groups), strict=True)])


@pytest.mark.parametrize("variant", ["qwen3", "qwen2", "llama, llama3 rope"])  # one tied model and two untied models
def test_values_and_gradient_match_transformers(tmp_path: Path, variant: str) -> None:
    model = make_family_model(tmp_path, variant)
    critic = make_critic(tmp_path, family=VARIANTS[variant][0], optimizer={"clip_grad": 0.0})
    assert not np.concatenate(critic.values(GROUPS)).any()  # the head is initialized with zeros
    weight, bias = set_head(critic)
    weight.requires_grad_()
    bias.requires_grad_()
    values = reference_values(model, weight, bias, GROUPS)
    np.testing.assert_allclose(values_of(critic, GROUPS), values.detach(), atol=2e-5, rtol=0)

    mask = column([of_tokens(group, group.loss_mask) for group in GROUPS])
    old, returns = (column([group.of_tokens(name) for group in GROUPS]) for name in ("values", "returns"))
    clipped = old + (values - old).clamp(-CLIP, CLIP)
    loss = (0.5 * torch.maximum((values - returns) ** 2, (clipped - returns) ** 2))[mask].mean()
    loss.backward()
    trunk = [parameter.grad for parameter in model.model.parameters() if parameter.grad is not None]
    norm = torch.stack([grad.norm() for grad in (*trunk, weight.grad, bias.grad)]).norm()
    metrics = train_step(critic, [GROUPS])
    assert metrics.loss == pytest.approx(loss.item(), rel=1e-5)
    assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-4)
    held = ((values - old).abs() > CLIP) & ((clipped - returns).abs() > (values - returns).abs())
    assert metrics.algorithm["clip"] == pytest.approx(float(held[mask].float().mean()))


def test_it_learns_the_returns(folder: Path) -> None:
    critic = make_critic(folder, optimizer={"lr": 3e-3})
    # Each prompt has one sample. The first tokens of several samples would share a state, and no value fits all
    # returns.
    alone = make_groups([[5], [8], [7], [4]], prompt_lengths=[9, 4, 3, 6])
    for step in range(60):
        values = critic.values(alone)
        groups = [group.with_extras(values=old) for group, old in zip(alone, values, strict=True)]
        metrics = train_step(critic, [groups], step=step)
        if not step:
            assert explained_variance(metrics.algorithm) == pytest.approx(0.0)  # all values are 0
    assert (explained_variance(metrics.algorithm) or 0.0) > 0.9


def test_micro_batches_order_and_packing_change_nothing(folder: Path) -> None:
    micro_batches = dp_groups()
    groups = [group for batch in micro_batches for group in batch]
    # Here each sample has a separate sequence that repeats the prompt.
    alone = [group.take([place]) for group in groups for place in range(len(group.episodes))]
    ways = {"whole": [groups], "split": [*micro_batches, []], "reversed": [groups[::-1]], "packed alone": [alone]}
    results = {}
    for name, way in ways.items():
        critic = make_critic(folder, optimizer={"eps": 1e-4})
        set_head(critic)
        results[name] = (train_step(critic, way), parameters(critic))
    whole, expected = results.pop("whole")
    for name, (metrics, found) in results.items():
        assert metrics.loss == pytest.approx(whole.loss, rel=1e-5), name
        assert metrics.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5), name
        assert (metrics.tokens, metrics.samples) == (whole.tokens, whole.samples)
        assert metrics.algorithm == pytest.approx(whole.algorithm, rel=1e-5, abs=2e-6), name  # rounding
        for parameter, tensor in found.items():
            torch.testing.assert_close(tensor, expected[parameter], atol=1e-6, rtol=0, msg=f"{name}: {parameter}")


def test_two_ranks_are_one(folder: Path, tmp_path: Path) -> None:
    critic = make_critic(folder, optimizer={"eps": 1e-4})
    for step in range(2):
        expected = train_step(critic, dp_groups(), step=step)
    for status, error in run_dp_ranks(folder, tmp_path / "two", steps=[2, 2], what="critic"):
        assert status == 0, error
    seen = json.loads((tmp_path / "two.json").read_text())
    assert seen["loss"] == pytest.approx(expected.loss, rel=1e-5)
    assert seen["grad_norm"] == pytest.approx(expected.grad_norm, rel=1e-5)
    assert seen["algorithm"] == pytest.approx(expected.algorithm, rel=1e-4)
    assert seen["tokens"] == expected.tokens
    found = load_file(tmp_path / "two.safetensors")
    for name, tensor in parameters(critic).items():
        torch.testing.assert_close(found[name], tensor.cpu(), atol=1e-6, rtol=0, msg=name)


def test_a_checkpoint_goes_on_to_the_bit(tmp_path: Path) -> None:
    variant = "qwen2"  # this variant has biases and untied weights
    make_family_model(tmp_path, variant)
    straight = make_critic(tmp_path, family=variant)
    train_step(straight, dp_groups(), step=0)
    straight.save(tmp_path / "checkpoint")
    expected = train_step(straight, dp_groups(), step=1)
    resumed = make_critic(tmp_path, family=variant)
    resumed.load(tmp_path / "checkpoint")
    metrics = train_step(resumed, dp_groups(), step=1)
    assert (metrics.loss, metrics.grad_norm) == (expected.loss, expected.grad_norm)
    for name, tensor in parameters(resumed).items():
        assert torch.equal(tensor, parameters(straight)[name]), name


def test_moments_are_those_of_trained_tokens() -> None:
    returns, values = np.array([1.0, 2.0, 9.0, 4.0], dtype=np.float32), np.array([0.5, 2.5, 0.0, 3.0], dtype=np.float32)
    mask = np.array([True, True, False, True])
    means = {
        name: total / count
        for name, (total, count) in moment_sums(returns=returns, values=values, loss_mask=mask).items()
    }
    error = (returns - values)[mask]
    assert explained_variance(means) == pytest.approx(1 - error.var() / returns[mask].var())
    flat = moment_sums(returns=np.full(4, 0.1, dtype=np.float32), values=values, loss_mask=mask)
    assert explained_variance({name: total / count for name, (total, count) in flat.items()}) is None
