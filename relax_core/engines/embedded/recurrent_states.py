"""The states of gated delta nets, for running samples and for the sequences of a prefill.

A state summarizes all tokens of one sample in one layer. It consists of the last inputs of the convolution and a matrix
for each head. Its size does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from relax_core.contracts.family import DeltaNet
from relax_core.engines.embedded.decoder_model import Recur
from relax_core.engines.embedded.model_config import ModelConfig
from relax_core.families.delta_rule import Segments, gated_delta_rule, unit_length


class StateTable:
    """Stores the states of samples, one slot per sample. The initial states are zeros.

    ``history`` is ``[layers, slots, kernel - 1, channels]`` in the model's dtype, newest input last. ``matrices`` is
    float32 ``[layers, slots, value_heads, key_dim, value_dim]``. ``layers`` counts only layers with a gated delta net.
    """

    def __init__(self, config: ModelConfig, dtype: torch.dtype, *, slots: int = 0) -> None:
        assert config.delta_net is not None, "only a model with a gated delta net has states"
        self.net: DeltaNet = config.delta_net
        net, layers = self.net, len(config.delta_layers)
        self.history = torch.zeros(layers, slots, net.kernel - 1, net.channels, dtype=dtype)
        self.matrices = torch.zeros(layers, slots, net.value_heads, net.key_dim, net.value_dim)

    @property
    def slots(self) -> int:
        """Returns the number of slots."""
        return self.history.shape[1]

    @property
    def nbytes(self) -> int:
        """Returns the size in bytes."""
        return self.history.nbytes + self.matrices.nbytes

    def reserve(self, slots: int) -> None:
        """Makes room for ``slots`` slots and keeps the contents."""
        if (missing := slots - self.slots) > 0:
            missing = max(missing, self.slots)  # at least doubles, because each growth copies the states
            self.history = F.pad(self.history, (0, 0, 0, 0, 0, missing))
            self.matrices = F.pad(self.matrices, (0, 0, 0, 0, 0, 0, 0, missing))

    def fill(self, first_slot: int, states: StateTable, source: Tensor) -> None:
        """Copies slot ``source[i]`` of ``states`` to slot ``first_slot`` + i; ``source`` is int64 ``[slots]``."""
        slots = slice(first_slot, first_slot + len(source))
        self.history[:, slots] = states.history.index_select(1, source)
        self.matrices[:, slots] = states.matrices.index_select(1, source)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copies the slots ``sources`` to the slots ``targets`` (int64, disjoint)."""
        self.history[:, targets] = self.history[:, sources]
        self.matrices[:, targets] = self.matrices[:, sources]

    def free(self) -> None:
        """Frees the memory."""
        self.history, self.matrices = self.history[:, :0].clone(), self.matrices[:, :0].clone()

    def step(self, count: int) -> Recur:
        """Returns the recurrence for one more token of each of the first ``count`` slots. A call updates the states."""
        net = self.net

        def recur(layer: int, mixed: Tensor, convolution: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
            history, matrices = self.history[layer, :count], self.matrices[layer, :count]
            window = torch.cat([history, mixed[:, None]], 1)
            history.copy_(window[:, 1:])
            query, key, value = _heads(F.silu((window * convolution.t()).sum(1)), net)
            query = unit_length(query.float()) * net.key_dim**-0.5
            key = unit_length(key.float())
            repeats = net.value_heads // net.key_heads
            query, key = (
                query.repeat_interleave(repeats, 1)[..., None, :],
                key.repeat_interleave(repeats, 1)[..., None, :],
            )
            matrices.mul_(decay.exp()[..., None, None])
            new = (value.float()[..., None, :] - key @ matrices).mul_(strength[..., None, None])
            matrices.add_(key.transpose(-1, -2) * new)
            return (query @ matrices)[..., 0, :]

        return recur


class PrefillStates(StateTable):
    """Stores the states of sequences that are computed in pieces, one slot per sequence.

    Padding does not change a state: the state of a sequence is the state after its last token.
    """

    def piece(self, lengths: Sequence[int], width: int) -> Recur:
        """Returns the recurrence for a piece of ``width`` tokens of every sequence, sequence by sequence.

        ``lengths`` has the number of remaining tokens of each sequence at the start of the piece. A sequence with 0 or
        less is finished; tokens beyond ``width`` belong to later pieces.
        """
        net, kept = self.net, self.net.kernel - 1
        own = torch.tensor(lengths).clamp(0, width)
        going = own.nonzero()[:, 0]
        real = (torch.arange(width) < own[:, None]).flatten().nonzero()[:, 0]
        segments = Segments.of(own[going].tolist())
        last = (own[:, None] + torch.arange(kept))[..., None].expand(-1, -1, net.channels)

        def recur(layer: int, mixed: Tensor, convolution: Tensor, decay: Tensor, strength: Tensor) -> Tensor:
            inputs = torch.cat([self.history[layer], mixed.unflatten(0, (-1, width))], 1)
            self.history[layer] = inputs.gather(1, last)
            convolved = inputs[:, kept:] * convolution[:, -1]
            for place in range(kept):
                convolved += inputs[:, place : place + width] * convolution[:, place]
            query, key, value = _heads(F.silu(convolved.flatten(0, 1).index_select(0, real)), net)
            decay, strength = decay.index_select(0, real), strength.index_select(0, real)
            before = self.matrices[layer, going]
            found, states = gated_delta_rule(query, key, value, decay, strength, segments, before)
            self.matrices[layer, going] = states
            outputs = found.new_zeros(len(mixed), net.value_heads, net.value_dim)
            return outputs.index_copy_(0, real, found)

        return recur


def _heads(mixed: Tensor, net: DeltaNet) -> tuple[Tensor, Tensor, Tensor]:
    """Splits convolved inputs ``[tokens, channels]`` into queries, keys and values, each ``[tokens, heads, dim]``."""
    query, key, value = mixed.split_with_sizes((net.keys, net.keys, net.values), 1)
    shape = (net.key_heads, net.key_dim)
    return query.unflatten(1, shape), key.unflatten(1, shape), value.unflatten(1, (net.value_heads, net.value_dim))
