"""Computes the steps of `benchmarks.parity` with Hugging Face: one padded batch and torch's AdamW."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from benchmarks.parity_case import CONFIG, OPTIMIZER, SPEC, STEPS, TEMPERATURE, Outcome
from benchmarks.parity_data import one_sample_each
from relax_core.config.schema import OptimizerConfig
from relax_core.contracts.algorithm import LossInputs, LossOutputs, StepTotals
from relax_core.contracts.tree import TokenTree
from tests.trees import answer_ids, of_tokens

Logits = Callable[[Any, Sequence[TokenTree]], list[Tensor]]  # (model, samples) → logits ``[rows, vocabulary]`` of each


def huggingface_steps(
    model: Any,
    groups: Sequence[TokenTree],
    *,
    banned: Sequence[int] = (),
    steps: int = STEPS,
    settings: OptimizerConfig = OPTIMIZER,
    logits: Logits | None = None,
    published: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None = None,
) -> Outcome:
    """Returns the outcome of some steps. Every sample is a row of one padded batch. The loss function is the same as in
    Relax and uses log-probs over the kept sets without ``banned`` tokens. ``logits`` replaces the padded forward pass.
    ``published`` converts tensors to the format of a model folder; with it the outcome has gradients.
    """
    logits = logits or _padded_logits
    model.train()
    norms = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": norms, "weight_decay": 0.0}],
        lr=settings.lr,
        betas=(0.9, settings.beta2),
        eps=settings.eps,
    )
    left = _left(model, groups, banned)
    with torch.no_grad():
        before, losses, grad_norms = _forward(model, groups, left, logits)[0].numpy(), list[float](), list[float]()
    gradients: Mapping[str, Tensor] = {}
    for step in range(steps):
        optimizer.zero_grad()
        logprobs, entropy = _forward(model, groups, left, logits)
        loss, denominator = _loss(logprobs, entropy, groups)
        (loss.loss_sum / denominator).backward()
        for parameter in model.parameters():  # A media tower without gradients (text only) has weight decay, too.
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip_grad)))
        losses.append(float(loss.loss_sum.detach()) / denominator)
        if published is not None and step == 0:
            gradients = published({name: parameter.grad.clone() for name, parameter in model.named_parameters()})
        optimizer.step()
    with torch.no_grad():
        after = _forward(model, groups, left, logits)[0].numpy()
    weights = _exported(model) if published is None else published(dict(model.named_parameters()))
    return Outcome(
        losses=losses,
        grad_norms=grad_norms,
        logprobs=[before, after],
        weights={n: w.detach() for n, w in weights.items()},
        gradients=gradients,
    )


def _left(model: Any, groups: Sequence[TokenTree], banned: Sequence[int]) -> Tensor:
    """Returns for each response token the set of tokens that it was sampled from, bool ``[tokens, vocab]``."""
    masks = [
        np.ones((int(group.lengths.sum()), model.config.get_text_config().vocab_size), dtype=bool)
        if group.kept is None
        else of_tokens(group, group.kept.mask())
        for group in groups
    ]
    left = torch.from_numpy(np.concatenate(masks))
    left[:, list(banned)] = False
    return left


def _padded_logits(model: Any, samples: Sequence[TokenTree]) -> list[Tensor]:
    sequences = [sample.token_ids for sample in samples]
    width = max(map(len, sequences))
    ids = torch.tensor(
        np.array([np.pad(sequence, (0, width - len(sequence))) for sequence in sequences]), dtype=torch.int64
    )
    attention = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences])
    return list(model(input_ids=ids, attention_mask=attention).logits)


def _forward(model: Any, groups: Sequence[TokenTree], left: Tensor, logits: Logits) -> tuple[Tensor, Tensor]:
    """Returns log-prob and entropy of every response token over the tokens in ``left``."""
    samples = one_sample_each(groups)
    every = [logit / TEMPERATURE for logit in logits(model, samples)]
    predicting = [of_rows[sample.tokens[1] - 1] for of_rows, sample in zip(every, samples, strict=True)]
    table = torch.cat(predicting).masked_fill(~left, -torch.inf).log_softmax(-1)
    targets = torch.from_numpy(np.concatenate([answer_ids(sample) for sample in samples])).long()
    surprise = table.masked_fill(~left, 0.0)
    return table.gather(1, targets[:, None])[:, 0], -(table.exp() * surprise).sum(1)


def _loss(logprobs: Tensor, entropy: Tensor, groups: Sequence[TokenTree]) -> tuple[LossOutputs, float]:
    def column(arrays: Sequence[np.ndarray]) -> Tensor:
        return torch.from_numpy(np.concatenate(arrays))

    lengths = np.concatenate([group.lengths for group in groups])
    mask = column([of_tokens(group, group.loss_mask) for group in groups])
    rollout = column([of_tokens(group, group.logprobs) for group in groups])
    sample_ids = torch.from_numpy(np.repeat(np.arange(len(lengths)), lengths))
    inputs = LossInputs(
        logprobs=logprobs,
        old_logprobs=rollout,
        rollout_logprobs=rollout,
        advantages=column([group.extras["advantages"] for group in groups]),
        loss_mask=mask,
        sample_ids=sample_ids,
        num_samples=len(lengths),
        entropy=entropy,
    )
    totals = StepTotals(tokens=int(mask.sum()), samples=len(sample_ids[mask].unique()), groups=len(groups))
    return SPEC.loss(inputs, CONFIG), SPEC.denominator(totals, CONFIG)


def _exported(model: Any) -> dict[str, Tensor]:
    """Returns the weights by their names on disk, because transformers fuses the experts of a layer in memory."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return load_file(Path(folder) / "model.safetensors")
