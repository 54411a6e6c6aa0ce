"""Saves and restores the states of all random streams of this process as tensors."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from megatron.core import tensor_parallel
from torch import Tensor

from relax_core.train.megatron_on_cpu.device_loader import has_cuda

_TRACKER = "megatron."


def random_state() -> dict[str, Tensor]:
    """Returns the states of torch, Python, numpy, the device and Megatron's tracker; their shapes never change."""
    _, words, next_gauss = random.getstate()
    numpy_state: dict[str, Any] = np.random.get_state(legacy=False)
    mersenne = numpy_state["state"]
    state = {
        "torch": torch.get_rng_state(),
        "python.words": torch.tensor(words),
        "python.gauss": torch.tensor([math.nan if next_gauss is None else next_gauss], dtype=torch.float64),
        "numpy.key": torch.from_numpy(mersenne["key"].astype(np.int64)),
        "numpy.position": torch.tensor([mersenne["pos"], numpy_state["has_gauss"]]),
        "numpy.gauss": torch.tensor([numpy_state["gauss"]], dtype=torch.float64),
    }
    if has_cuda():
        state["cuda"] = torch.cuda.get_rng_state()
    tracker = tensor_parallel.get_cuda_rng_tracker().get_states()
    return state | {_TRACKER + stream: tensor.clone() for stream, tensor in tracker.items()}


def set_random_state(state: Mapping[str, Tensor]) -> None:
    """Restores the states that `random_state` returned."""
    torch.set_rng_state(state["torch"])
    next_gauss: float = state["python.gauss"].item()
    random.setstate((3, tuple(state["python.words"].tolist()), None if math.isnan(next_gauss) else next_gauss))
    position, has_gauss = state["numpy.position"].tolist()
    key = state["numpy.key"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", key, position, has_gauss, state["numpy.gauss"].item()))
    if has_cuda():
        torch.cuda.set_rng_state(state["cuda"])
    tracker = {name.removeprefix(_TRACKER): tensor for name, tensor in state.items() if name.startswith(_TRACKER)}
    tensor_parallel.get_cuda_rng_tracker().set_states(tracker)
