"""Implements the algorithms in plain Python floats (float64) without torch, from the papers, independent of our code.

A sample is a dict of lists with one entry per response token: ``mask`` (1 = trained), ``advantages``, ``logprobs``,
``old_logprobs``, ``rollout_logprobs``, ``reference_logprobs``; with an entropy bonus also ``entropy``, with a critic
``values``, and in the cases of the critic's loss ``old_values`` and ``returns``. Terms under a stop-gradient in the
papers use the sample's ``logprobs``. The gradient is with respect to the log-probs ``live``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Sample = Mapping[str, Sequence[float]]
Config = Mapping[str, Any]
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "rloo", "reinforce_pp", "ppo")
LIMIT = 20.0  # clamp of log-ratios


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def log_ratio(numerator: float, denominator: float) -> float:
    return clamp(numerator - denominator, -LIMIT, LIMIT)


def kl(x: float, estimator: str) -> float:
    k3 = math.exp(-x) + x - 1
    return {"k1": x, "k2": x * x / 2, "k3": k3, "k3_clamped": min(k3, 10.0), "abs": abs(x)}[estimator]


def kl_term(config: Config, *, live: float, frozen: float, old: float, reference: float) -> float:
    """Returns the KL as a loss. ``frozen`` is the log-prob under a stop-gradient."""
    x, held = log_ratio(live, reference), log_ratio(frozen, reference)
    estimator = config["kl_estimator"]
    if config["kl_placement"] == "loss_times_ratio":
        ratio = math.exp(log_ratio(live, old))
        return min(ratio * kl(x, "k3"), 10.0) if estimator == "k3_clamped" else ratio * kl(x, estimator)
    if config["kl_placement"] == "loss_k2_gradient":
        return kl(held, estimator) + (x * x - held * held) / 2
    return kl(x, estimator)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


# -- the loss -------------------------------------------------------------------------------------------------------
def losses(
    algorithm: str, config: Config, samples: Sequence[Sample], live: Sequence[Sequence[float]]
) -> list[list[float]]:
    """Returns the loss of every token before aggregation. Untrained tokens have 0."""
    return [_sample_losses(algorithm, config, sample, new) for sample, new in zip(samples, live, strict=True)]


def _sample_losses(algorithm: str, config: Config, sample: Sample, live: Sequence[float]) -> list[float]:
    frozen = sample["logprobs"]
    trained = [place for place, is_trained in enumerate(sample["mask"]) if is_trained]
    old = frozen if config["old_logprobs"] == "current" else sample["old_logprobs"]
    if config["old_logprobs"] == "rollout":
        old = sample["rollout_logprobs"]
    moved = {t: log_ratio(live[t], old[t]) for t in trained}
    since_old, since_sampled = (
        -sum(log_ratio(frozen[t], earlier[t]) for t in trained) / max(1, len(trained))
        for earlier in (old, sample["rollout_logprobs"])
    )
    weights = weights_of(config, {t: log_ratio(old[t], sample["rollout_logprobs"][t]) for t in trained})
    trainer = sample["old_logprobs"] if config["old_logprobs"] == "actor_fwd" else frozen
    for t in _rejected(config, {t: (trainer[t], sample["rollout_logprobs"][t]) for t in trained}):
        weights[t] = 0.0
    out = [0.0] * len(live)
    for t in trained:
        a = sample["advantages"][t]
        if algorithm == "sapo":
            tau = config["tau_positive"] if a > 0 else config["tau_negative"]
            value = -4 / tau * sigmoid(tau * (math.exp(moved[t]) - 1)) * a
        elif algorithm == "cispo":
            r = math.exp(log_ratio(frozen[t], old[t]))
            value = -clamp(r, 1 - config["clip_low"], 1 + config["clip_high"]) * a * live[t]
            if config["trust_region"] == "ratio":  # M = 0 of the unified form
                value *= not ((a > 0 and r > 1 + config["clip_high"]) or (a < 0 and r < 1 - config["clip_low"]))
        elif algorithm == "gspo" and len(set(weights.values())) == 1:
            # The paper's sequence form: one ratio with the gradient of every token.
            value = _clipped(math.exp(sum(moved.values()) / len(trained)), a, config)
        elif algorithm == "gspo":  # the paper's token form (GSPO-token) supports a weight per token
            value = _clipped(math.exp(-since_old) * math.exp(live[t] - frozen[t]), a, config)
        elif config["trust_region"] != "ratio":
            value = _unclipped(math.exp(moved[t]), a, config)
            value *= not _moved_too_far(math.exp(frozen[t]) - math.exp(old[t]), a, config)
        else:
            value = _clipped(math.exp(moved[t]), a, config)
        value *= weights[t]
        if config["opsm_threshold"] > 0 and a < 0 and since_sampled > config["opsm_threshold"]:
            value = 0.0
        if config["kl_coef"] > 0 and config["kl_placement"] != "reward":
            reference = sample["reference_logprobs"][t]
            value += config["kl_coef"] * kl_term(
                config, live=live[t], frozen=frozen[t], old=old[t], reference=reference
            )
        if config["entropy_coef"] > 0:
            value -= config["entropy_coef"] * sample["entropy"][t]
        out[t] = value
    return out


def _clipped(ratio: float, a: float, config: Config) -> float:
    objective = min(ratio * a, clamp(ratio, 1 - config["clip_low"], 1 + config["clip_high"]) * a)
    if config["dual_clip"] and a < 0:
        objective = max(objective, config["dual_clip"] * a)
    return -objective


def _unclipped(ratio: float, a: float, config: Config) -> float:
    objective = ratio * a
    if config["dual_clip"] and a < 0:
        objective = max(objective, config["dual_clip"] * a)
    return -objective


def _moved_too_far(difference: float, a: float, config: Config) -> bool:
    """Returns whether a token is masked. DPPO masks large moves in the advantage's direction, IPO all large moves."""
    up, down = difference > config["clip_high"], difference < -config["clip_low"]
    if config["trust_region"] == "probability_both":
        return up or down
    return up if a > 0 else down


def _rejected(config: Config, pairs: Mapping[int, tuple[float, float]]) -> set[int]:
    """Returns the trained tokens that a rule leaves out. ``pairs``: token → (trainer's log π, engine's log μ)."""
    rho = {t: math.exp(log_ratio(trainer, engine)) for t, (trainer, engine) in pairs.items()}
    statistics: dict[str, dict[int, float]] = {
        "ratio": rho,
        "k1": {t: -math.log(r) for t, r in rho.items()},
        "k2": {t: math.log(r) ** 2 / 2 for t, r in rho.items()},
        "k3": {t: r - 1 - math.log(r) for t, r in rho.items()},
        "difference": {t: math.exp(trainer) - math.exp(engine) for t, (trainer, engine) in pairs.items()},
    }
    out: set[int] = set()
    for rule, (low, high) in config["rejection"].items():
        scope, name = rule.rsplit("_", 1)
        values = statistics[name]
        wrong = {t for t, value in values.items() if not low <= value <= high}
        if scope == "token":
            out |= wrong
            continue
        if scope == "seq_any":
            sample_is_out = bool(wrong)
        elif not values:
            sample_is_out = False
        else:
            of_sample = math.prod(values.values()) if name == "ratio" else math.fsum(values.values())
            if scope == "seq_mean":
                of_sample = of_sample ** (1 / len(values)) if name == "ratio" else of_sample / len(values)
            sample_is_out = not low <= of_sample <= high
        if sample_is_out:
            out |= set(values)
    return out


def weights_of(config: Config, rho: Mapping[int, float]) -> dict[int, float]:
    """Returns the importance weights of the trained tokens, from log π_old - log μ."""
    method = config["correction"]
    if method == "auto":
        method = "none" if config["old_logprobs"] == "rollout" else "tis"
    if method == "none":
        return dict.fromkeys(rho, 1.0)
    if config["correction_level"] == "sequence":
        rho = dict.fromkeys(rho, clamp(sum(rho.values()), -LIMIT, LIMIT))
    if config["correction_level"] == "geometric":
        rho = dict.fromkeys(rho, sum(rho.values()) / max(1, len(rho)))
    low, high = config["correction_low"], config["correction_high"]
    ratios = {t: math.exp(x) for t, x in rho.items()}
    if method in ("tis", "tis_normalized"):
        return {t: clamp(r, low, high) for t, r in ratios.items()}
    return {t: r if low <= r <= high else 0.0 for t, r in ratios.items()}


def step_loss(config: Config, samples: Sequence[Sample], per_token: Sequence[Sequence[float]]) -> float:
    """Returns the step's loss over samples with a trained token, by the definition in the aggregation's paper."""
    kept = [
        ([x for x, is_trained in zip(values, sample["mask"], strict=True) if is_trained])
        for sample, values in zip(samples, per_token, strict=True)
        if any(sample["mask"])
    ]
    if config["aggregation"] == "token_mean":
        return math.fsum(x for values in kept for x in values) / sum(map(len, kept))
    if config["aggregation"] == "seq_mean_token_mean":
        return math.fsum(math.fsum(values) / len(values) for values in kept) / len(kept)
    return math.fsum(math.fsum(values) / config["norm_length"] for values in kept) / len(kept)


def gradient(algorithm: str, config: Config, samples: Sequence[Sample], *, step: float = 1e-5) -> list[list[float]]:
    """Returns the gradient of the step's loss for each log-prob. Values under a stop-gradient stay fixed."""

    def loss(moved: Sequence[Sample]) -> float:
        return step_loss(config, samples, losses(algorithm, config, samples, [sample["logprobs"] for sample in moved]))

    return differences(samples, "logprobs", loss, step=step)


def differences(
    samples: Sequence[Sample], name: str, loss: Callable[[Sequence[Sample]], float], *, step: float = 1e-5
) -> list[list[float]]:
    """Returns the gradient for each entry of the sample lists ``name``, by central differences of fourth order."""

    def at(i: int, t: int, by: float) -> float:
        row = list(samples[i][name])
        row[t] += by
        return loss([*samples[:i], {**samples[i], name: row}, *samples[i + 1 :]])

    return [
        [
            (8 * (at(i, t, step) - at(i, t, -step)) - (at(i, t, 2 * step) - at(i, t, -2 * step))) / (12 * step)
            for t in range(len(sample[name]))
        ]
        for i, sample in enumerate(samples)
    ]


def entropy_gradient(algorithm: str, config: Config, samples: Sequence[Sample]) -> list[list[float]]:
    """Returns the gradient of the step's loss for each entropy."""

    def loss(moved: Sequence[Sample]) -> float:
        return step_loss(config, moved, losses(algorithm, config, moved, [sample["logprobs"] for sample in moved]))

    return differences(samples, "entropy", loss)


# -- the critic -----------------------------------------------------------------------------------------------------
def value_losses(config: Config, samples: Sequence[Sample]) -> list[list[float]]:
    """Returns for every token half the larger squared error of two: the value, and the value clipped around its old
    value. Untrained tokens have 0."""
    out = []
    for sample in samples:
        row = [0.0] * len(sample["mask"])
        for t, is_trained in enumerate(sample["mask"]):
            if not is_trained:
                continue
            value, old, target = sample["values"][t], sample["old_values"][t], sample["returns"][t]
            near = (
                clamp(value, old - config["value_clip"], old + config["value_clip"]) if config["value_clip"] else value
            )
            row[t] = max((value - target) ** 2, (near - target) ** 2) / 2
        out.append(row)
    return out


def value_gradient(config: Config, samples: Sequence[Sample]) -> list[list[float]]:
    """Returns the gradient of the step's critic loss for each value."""
    return differences(samples, "values", lambda moved: step_loss(config, moved, value_losses(config, moved)))
