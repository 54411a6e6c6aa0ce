"""The state of Megatron's optimizers, whichever they are, parameter by parameter and in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class AdamState:
    """Of a parameter, or with the distributed optimizer of this rank's share of it: views ``[elements]`` of the state.

    ``start``: the place of the first element in the parameter. ``main``: its float32 copy; None where the parameter is
    float32 itself.
    """

    start: int
    main: Tensor | None
    exp_avg: Tensor
    exp_avg_sq: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """By name, without what is not there."""
        found = {"main": self.main, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return {name: tensor for name, tensor in found.items() if tensor is not None}


def adam_states(optimizer: Any, parameters: Sequence[torch.nn.Parameter]) -> dict[torch.nn.Parameter, AdamState]:
    """Of those ``parameters`` that this rank steps; there after the first step, or `create_optimizer_state`."""
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
    """Adam's step counter, which is the same for all parameters; 0 before the first update."""
    for one in _optimizers(optimizer):
        for group in one.optimizer.param_groups:
            if "step" in group:
                return int(group["step"])
        for state in one.optimizer.state.values():
            return int(state["step"])
    return 0


def set_updates_done(optimizer: Any, updates: int) -> None:
    """torch's Adam counts in each parameter's state, the fused ones in their groups."""
    for one in _optimizers(optimizer):
        if not isinstance(one.optimizer, (torch.optim.Adam, torch.optim.AdamW)):
            for group in one.optimizer.param_groups:
                group["step"] = updates
        for state in one.optimizer.state.values():
            state["step"].fill_(updates)


def create_optimizer_state(optimizer: Any) -> None:
    """Gives every parameter that has none yet zeroed Adam state, as its first step would."""
    for one in _optimizers(optimizer):
        for group in one.optimizer.param_groups:
            for parameter in group["params"]:
                if not one.optimizer.state[parameter]:
                    one.optimizer.state[parameter].update(
                        step=torch.tensor(0.0),
                        exp_avg=torch.zeros_like(parameter),
                        exp_avg_sq=torch.zeros_like(parameter),
                    )


def _optimizers(optimizer: Any) -> list[Any]:
    """Megatron chains one for each kind of parameters; a rank without any of a kind has a stub."""
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [one for one in chained if not getattr(one, "is_stub_optimizer", False)]
