"""Measures how well the critic predicts returns, with sums that add up over micro-batches, ranks and updates.

It imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

MOMENTS = ("return", "return_squared", "error", "error_squared")


def moment_sums(*, returns: np.ndarray, values: np.ndarray, loss_mask: np.ndarray) -> dict[str, tuple[float, float]]:
    """Returns name → (sum, count) over trained tokens of R, R², R - V and (R - V)² in float64; inputs ``[tokens]``."""
    trained = returns[loss_mask].astype(np.float64)
    error = trained - values[loss_mask]
    sums = (trained.sum(), np.square(trained).sum(), error.sum(), np.square(error).sum())
    return {name: (float(total), float(trained.size)) for name, total in zip(MOMENTS, sums, strict=True)}


def explained_variance(means: Mapping[str, float]) -> float | None:
    """Returns 1 - Var(R - V) / Var(R) from the means of the moments, or None if all returns are equal to rounding.

    The value is 1 for a perfect critic and 0 for one that predicts the mean.
    """
    variance = means["return_squared"] - means["return"] ** 2
    if variance <= 1e-9 * means["return_squared"]:
        return None
    return 1.0 - (means["error_squared"] - means["error"] ** 2) / variance
