"""Compares with transformers and torch.optim.AdamW in float32 on a full batch, sequence by sequence without packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_trainer import CONFIG, clip_loss, make_backend, make_groups, train_step

from benchmarks.family_models import VARIANTS, make_family_model
from relax_core.contracts.algorithm import LossInputs
from relax_core.contracts.tree import TokenTree
from relax_core.train.device import training_device
from tests.trees import answers_of, of_tokens, prompt_of

GROUPS = make_groups([[5, 1, 8, 3], [7, 7, 2, 4], [1, 1, 1, 1]], prompt_lengths=[9, 4, 1], masked=0.2)


def reference_logprobs(model: Any, groups: list[TokenTree], *, temperature: float = 1.0) -> torch.Tensor:
    """Returns log-probs of all response tokens. Computes each sample in a separate forward pass."""
    parts = []
    for group in groups:
        prompt = prompt_of(group)
        for response in answers_of(group):
            sequence = torch.from_numpy(np.concatenate([prompt, response])).long()[None]
            logits = model(sequence).logits[0, len(prompt) - 1 : -1] / temperature
            parts.append(logits.log_softmax(-1).gather(-1, sequence[0, len(prompt) :, None])[:, 0])
    return torch.cat(parts)


def reference_loss(model: Any, groups: list[TokenTree]) -> torch.Tensor:
    def column(arrays: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    mask = column([of_tokens(group, group.loss_mask) for group in groups])
    rollout = column([of_tokens(group, group.logprobs) for group in groups])
    inputs = LossInputs(
        logprobs=reference_logprobs(model, groups),
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=column([group.extras["advantages"] for group in groups]),
        loss_mask=mask,
        sample_ids=torch.zeros(len(mask), dtype=torch.int64),
        num_samples=1,
    )
    return clip_loss(inputs, CONFIG).loss_sum / mask.sum()


@pytest.mark.parametrize(("variant", "temperature"), [*((variant, 1.0) for variant in VARIANTS), ("qwen3", 0.7)])
def test_logprobs_match(tmp_path: Path, variant: str, temperature: float) -> None:
    model = make_family_model(tmp_path, variant)
    backend = make_backend(tmp_path, family=VARIANTS[variant][0], temperature=temperature)
    with torch.no_grad():
        expected = reference_logprobs(model, GROUPS, temperature=temperature).numpy()
    found = [of_tokens(group, logprob) for group, logprob in zip(GROUPS, backend.logprobs(GROUPS), strict=True)]
    np.testing.assert_allclose(np.concatenate(found), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("variant", ["qwen3", "llama, llama3 rope"])
def test_logits_match(tmp_path: Path, variant: str) -> None:
    """A prompt with a one-token response is a plain sequence. Its hidden states give the model's logits."""
    from relax_core.train.micro_batches import pack_tree
    from relax_core.train.model.tree_attention import TreeBatch

    model = make_family_model(tmp_path, variant)
    backend = make_backend(tmp_path, family=VARIANTS[variant][0])
    group = make_groups([[1]], prompt_lengths=[121])[0]  # these positions use all rotary frequencies
    tree = TreeBatch.of(pack_tree([group]), device=training_device().torch, dtype=torch.float32)
    with torch.no_grad():
        logits = backend.model(tree) @ backend.model.output_weight().t()
        expected = model(torch.from_numpy(prompt_of(group)).long()[None]).logits[0]
    torch.testing.assert_close(logits.cpu(), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("variant", "distributed_optimizer"),
    [("qwen3", False), ("qwen3", True), ("qwen2", True), ("llama, tied, linear rope", False), ("mistral", False)],
)
def test_two_steps_match_adamw(tmp_path: Path, variant: str, distributed_optimizer: bool) -> None:
    model = make_family_model(tmp_path, variant)
    backend = make_backend(
        tmp_path,
        family=VARIANTS[variant][0],
        optimizer={"weight_decay": 0.1, "eps": 1e-4},
        distributed_optimizer=distributed_optimizer,
    )
    matrices = [p for p in model.parameters() if p.dim() > 1]
    norms = [p for p in model.parameters() if p.dim() == 1]
    # With a tiny epsilon Adam's first step is lr * sign(gradient), and rounding changes the sign of a tiny gradient.
    reference = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1e-3,
        betas=(0.9, 0.99),
        eps=1e-4,
    )
    for step in range(2):
        reference.zero_grad()
        loss = reference_loss(model, GROUPS)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        reference.step()
        metrics = train_step(backend, [GROUPS], step=step)
        assert metrics.loss == pytest.approx(loss.item(), abs=1e-6)
        assert metrics.grad_norm == pytest.approx(float(norm), rel=1e-5)
    expected = model.state_dict()
    for name, tensor in backend.export():
        torch.testing.assert_close(tensor.cpu(), expected[name], atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant != "qwen3_moe"])  # see test_moe.py
def test_gradients_match(tmp_path: Path, variant: str) -> None:
    """Compares gradients as HF tensors. The tied output weight is also used outside the model's forward pass."""
    from relax_core.train.hf.hf_weights import HfWeights

    model = make_family_model(tmp_path, variant)
    backend = make_backend(tmp_path, family=VARIANTS[variant][0], optimizer={"clip_grad": 0.0})
    reference_loss(model, GROUPS).backward()
    backend.begin_step(0)
    backend.accumulate(GROUPS)
    tokens = sum(int(group.loss_mask.sum()) for group in GROUPS)
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    gradients = HfWeights([backend.model], backend.architecture, tensor_of=lambda parameter: parameter.main_grad)
    for name, gradient in gradients.export():
        scale = float(expected[name].abs().max())
        mine = gradient.cpu() / tokens
        torch.testing.assert_close(mine, expected[name], atol=2e-6 * max(1.0, scale), rtol=1e-4, msg=name)
