"""How well the critic foresaw the returns, from sums that add up over micro-batches, ranks and updates. No torch."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

MOMENTS = ("return", "return_squared", "error", "error_squared")


def moment_sums(*, returns: np.ndarray, values: np.ndarray, loss_mask: np.ndarray) -> dict[str, tuple[float, float]]:
    """Name → (sum, count) over trained tokens of R, R², R - V and (R - V)², in float64; all inputs ``[tokens]``."""
    trained = returns[loss_mask].astype(np.float64)
    error = trained - values[loss_mask]
    sums = (trained.sum(), np.square(trained).sum(), error.sum(), np.square(error).sum())
    return {name: (float(total), float(trained.size)) for name, total in zip(MOMENTS, sums, strict=True)}


def explained_variance(means: Mapping[str, float]) -> float | None:
    """1 - Var(R - V) / Var(R) from the moments' means: 1 is a perfect critic, 0 one that knows the mean alone. None
    where all returns are equal, to rounding."""
    variance = means["return_squared"] - means["return"] ** 2
    if variance <= 1e-9 * means["return_squared"]:
        return None
    return 1.0 - (means["error_squared"] - means["error"] ** 2) / variance
