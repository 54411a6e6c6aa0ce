"""Runs an embedded engine that does not serve the weights that it is sent, for `benchmarks.elastic_offers`.

    python -m benchmarks.bad_engine KIND [flags of relax_core.engines.embedded]

``other_digest``: its weights differ from the published ones by a little noise, and it says that they are in force.
``cut_file``: every published file ends early for it, so it refuses each update. ``stale``: it keeps the weights of its
folder, and says that each version is in force.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from relax_core.engines.embedded import __main__ as embedded

NOISE = 0.05  # times each tensor's standard deviation
KINDS = ("other_digest", "cut_file", "stale")


def spoil(kind: str) -> None:
    """Changes the embedded engine of this process."""
    import torch

    from relax_core.engines.embedded.model import weight_updates
    from relax_core.engines.embedded.model.fused_weights import FusedWeights
    from relax_core.weights.version_file import DigestMismatch

    apply: Callable[..., None] = FusedWeights.apply

    def with_noise(weights: FusedWeights, tensors: Mapping[str, torch.Tensor]) -> None:
        apply(weights, {name: one + NOISE * one.std() * torch.randn_like(one) for name, one in tensors.items()})

    def once(weights: FusedWeights, tensors: Mapping[str, torch.Tensor]) -> None:
        if not hasattr(weights, "has_some"):
            apply(weights, tensors)
            vars(weights)["has_some"] = True

    def ends_early(*words: Any, **named: Any) -> Iterator[Any]:
        raise DigestMismatch("the file ends early")

    if kind == "cut_file":
        weight_updates.read_weights = ends_early
    else:
        setattr(FusedWeights, "apply", with_noise if kind == "other_digest" else once)  # noqa: B010


if __name__ == "__main__":
    spoil(sys.argv[1])
    sys.exit(embedded.main(sys.argv[2:]))
