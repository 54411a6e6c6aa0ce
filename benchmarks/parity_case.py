"""Defines the loss, the optimizer and the comparison that every row of `benchmarks.parity` uses for its two steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from algorithms import gspo
from relax_core.config.choices import Schedule
from relax_core.config.schema import OptimizerConfig
from relax_core.contracts.algorithm import LossInputs, LossOutputs, Requirements

STEPS = 2  # some errors appear only in the second step (stale parameters, counts of gradients)
# A step changes a weight by lr * g / (|g| + eps). With an eps as large as the gradients, the change measures the
# gradient. With a tiny eps, the change would measure the gradient's sign, which is noise for a gradient of rounding
# errors.
OPTIMIZER = OptimizerConfig(
    lr=3e-2,
    min_lr_ratio=0.0,
    schedule=Schedule.constant,
    warmup_steps=0,
    beta2=0.99,
    eps=1e-2,
    weight_decay=0.1,
    clip_grad=1.0,
)
CONFIG = dataclasses.replace(gspo.GspoConfig(group_size=4), clip_low=0.1, clip_high=0.1)
ENTROPY_WEIGHT = 0.01
TEMPERATURE = 0.9
NO_GRADIENT = 1e-6  # share of the largest gradient's norm; smaller gradients are only rounding, as for the bias of keys


def _loss_with_entropy(inputs: LossInputs, config: gspo.GspoConfig) -> LossOutputs:
    """Returns GSPO's loss with an entropy bonus. Its ratio per sequence needs a sample's tokens from all ranks."""
    assert inputs.entropy is not None
    outputs = gspo.loss(inputs, config)
    bonus = (inputs.entropy * inputs.loss_mask).sum()
    return dataclasses.replace(outputs, loss_sum=outputs.loss_sum - ENTROPY_WEIGHT * bonus)


SPEC = dataclasses.replace(
    gspo.SPEC, loss=_loss_with_entropy, requirements=lambda config: Requirements(old_logprobs="rollout", entropy=True)
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """Holds the results of some steps: loss and gradient norm of each step, log-probs before and after the steps, and
    the final weights. For a mixture of experts also the experts' loads in each step. A backend that does not train has
    log-probs only.
    """

    losses: list[float]
    grad_norms: list[float]
    logprobs: list[np.ndarray]
    weights: Mapping[str, Tensor]
    loads: list[float] = dataclasses.field(default_factory=list)
    gradients: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)  # of the first step, clipped to norm 1

    def difference(self, reference: Outcome) -> dict[str, float]:
        """Returns the largest absolute differences, and for the gradient norm the largest relative difference."""

        def widest(ours: Any, theirs: Any) -> float:
            return max(float(np.abs(np.asarray(a) - np.asarray(b)).max()) for a, b in zip(ours, theirs, strict=True))

        if not self.losses:
            return {"logprobs": widest(self.logprobs, reference.logprobs[:1])}
        assert self.weights.keys() == reference.weights.keys()
        found = {
            "loss": widest(self.losses, reference.losses),
            "grad_norm": widest(np.divide(self.grad_norms, reference.grad_norms), np.ones(len(self.grad_norms))),
            "weights": max(
                float((tensor - reference.weights[name]).abs().max()) for name, tensor in self.weights.items()
            ),
            "logprobs": widest(self.logprobs, reference.logprobs),
        }
        if self.gradients and reference.gradients:
            assert self.gradients.keys() == reference.gradients.keys()
            of_tensors = (
                (gradient - reference.gradients[name]).abs().max() for name, gradient in self.gradients.items()
            )
            found["gradients"] = max(map(float, of_tensors))
        return found

    def each_gradient(self, reference: Outcome) -> float:
        """Returns the largest norm of a gradient difference, relative to the gradient's norm in ``other``.

        For gradients that are only rounding, the difference is relative to the largest norm of all gradients.
        """
        assert self.gradients.keys() == reference.gradients.keys() and self.gradients
        norms = {name: float(gradient.norm()) for name, gradient in reference.gradients.items()}
        largest = max(norms.values())
        sizes = {name: norm if norm > NO_GRADIENT * largest else largest for name, norm in norms.items()}
        return max(
            float((gradient - reference.gradients[name]).norm()) / sizes[name]
            for name, gradient in self.gradients.items()
        )

    def save(self, path: Path) -> None:
        arrays = {f"logprobs.{index}": torch.from_numpy(array) for index, array in enumerate(self.logprobs)}
        figures = {"losses": torch.tensor(self.losses), "grad_norms": torch.tensor(self.grad_norms)}
        figures["loads"] = torch.tensor(self.loads)
        gradients = {f"gradient.{name}": gradient.contiguous() for name, gradient in self.gradients.items()}
        doubles = {name: tensor.double() for name, tensor in figures.items()}
        save_file({**arrays, **doubles, **gradients, **self.weights}, path)

    @staticmethod
    def read(path: Path) -> Outcome:
        tensors = load_file(path)
        gradients = {name: tensors.pop(name) for name in list(tensors) if name.startswith("gradient.")}
        return Outcome(
            losses=tensors.pop("losses").tolist(),
            grad_norms=tensors.pop("grad_norms").tolist(),
            logprobs=[tensors.pop(f"logprobs.{index}").numpy() for index in range(2)],
            loads=tensors.pop("loads").tolist(),
            weights=tensors,
            gradients={name.removeprefix("gradient."): gradient for name, gradient in gradients.items()},
        )
