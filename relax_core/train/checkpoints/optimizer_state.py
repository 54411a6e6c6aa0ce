"""Reads and sets the state of Megatron's optimizers parameter by parameter, in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """Holds flat views ``[elements]`` of Adam's state of a parameter, or of this rank's share of it.

    A rank has only a share with the distributed optimizer. ``start`` is the index of the first element within the
    parameter. ``main`` is the float32 copy of the parameter, or None if the parameter itself is float32.
    """

    start: int
    main: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """Returns the state's tensors by name, without those that do not exist."""
        found = {"main": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def adam_states(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, AdamState]:
    """Returns the state of the ``parameters`` that this rank updates; it exists from the first update on."""
    found = {}
    for one in _optimizers(optimizer):
        for parameter in parameters:
            if isinstance(one, DistributedOptimizer):
                if parameter not in one.model_param_group_index_map:
                    continue
                state = one._get_main_param_and_optimizer_states(parameter)
                main, start = state["param"], one._get_model_param_range_map(parameter)["param"].start
            else:
                main, start = getattr(parameter, "main_param", parameter), 0
                if main not in one.optimizer.state:
                    continue
                state = one.optimizer.state[main]
            found[parameter] = AdamState(
                start=start,
                main=None if parameter.dtype is torch.float32 else main.detach().view(-1),
                exp_avg=state["exp_avg"].view(-1),
                exp_avg_sq=state["exp_avg_sq"].view(-1),
            )
    return found


def updates_done(optimizer: Any) -> int:
    """Returns Adam's step counter, which is equal for all parameters and 0 before the first update."""
    for one in _optimizers(optimizer):
        for group in one.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in one.optimizer.state.values():
            return int(state["step"])
    return 0


def set_updates_done(optimizer: Any, updates: int) -> None:
    """Sets Adam's step counter, which torch keeps in each parameter's state and fused optimizers in their groups."""
    for one in _optimizers(optimizer):
        if not isinstance(one.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in one.optimizer.param_groups:
                group["step"] = updates
        for state in one.optimizer.state.values():
            state["step"].fill_(updates)


def create_optimizer_state(optimizer: Any) -> None:
    """Gives every parameter without Adam state a zeroed state, as its first step does."""
    for one in _optimizers(optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if not one.optimizer.state[parameter]:
                    one.optimizer.state[parameter].update(
                        step=torch.zeros((), device=parameter.device),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def _optimizers(optimizer: Any) -> list[Any]:
    """Returns the optimizers that Megatron chains, one for each kind of parameters, without stubs."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
