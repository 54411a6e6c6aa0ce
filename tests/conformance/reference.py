"""The algorithms' formulas in plain Python floats (float64), written from the papers and not from our code. No torch.

A sample is a dict of equally long lists, one entry a response token: ``mask`` (1 = trained), ``advantages``,
``logprobs``, ``old_logprobs``, ``rollout_logprobs``, ``reference_logprobs``; ``entropy`` where there is a bonus; with a
critic ``values``, and in the cases of its loss ``old_values`` and ``returns``. What stands under a stop-gradient in the
papers is computed from the sample's own ``logprobs``; ``live`` are the log-probs that the gradient is taken of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Sample = Mapping[str, Sequence[float]]
Knobs = Mapping[str, Any]
ALGORITHMS = ("grpo", "dr_grpo", "dapo", "gspo", "sapo", "cispo", "rloo", "reinforce_pp", "ppo")
LIMIT = 20.0  # on log-ratios


def clamp(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def log_ratio(numerator: float, denominator: float) -> float:
    return clamp(numerator - denominator, -LIMIT, LIMIT)


def kl(x: float, estimator: str) -> float:
    return {"k1": x, "k2": x * x / 2, "k3": math.exp(-x) + x - 1}[estimator]


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x)) if x > -700 else 0.0


# -- the loss -------------------------------------------------------------------------------------------------------
def losses(
    algorithm: str, knobs: Knobs, samples: Sequence[Sample], live: Sequence[Sequence[float]]
) -> list[list[float]]:
    """The loss of every token before aggregation; 0 where it is not trained."""
    return [_sample_losses(algorithm, knobs, sample, new) for sample, new in zip(samples, live, strict=True)]


def _sample_losses(algorithm: str, knobs: Knobs, sample: Sample, live: Sequence[float]) -> list[float]:
    frozen = sample["logprobs"]
    trained = [place for place, one in enumerate(sample["mask"]) if one]
    old = frozen if knobs["old_logprobs"] == "current" else sample["old_logprobs"]
    if knobs["old_logprobs"] == "rollout":
        old = sample["rollout_logprobs"]
    moved = {t: log_ratio(live[t], old[t]) for t in trained}
    drift = -sum(log_ratio(frozen[t], old[t]) for t in trained) / max(1, len(trained))
    weights = _weights(knobs, {t: log_ratio(old[t], sample["rollout_logprobs"][t]) for t in trained})
    out = [0.0] * len(live)
    for t in trained:
        a = sample["advantages"][t]
        if algorithm == "sapo":
            tau = knobs["tau_positive"] if a > 0 else knobs["tau_negative"]
            value = -4 / tau * sigmoid(tau * (math.exp(moved[t]) - 1)) * a
        elif algorithm == "cispo":
            r = math.exp(log_ratio(frozen[t], old[t]))
            value = -clamp(r, 1 - knobs["clip_low"], 1 + knobs["clip_high"]) * a * live[t]
        elif algorithm == "gspo" and len(set(weights.values())) == 1:
            # The paper's sequence form: one ratio, in which every token's gradient meets.
            value = _clipped(math.exp(sum(moved.values()) / len(trained)), a, knobs)
        elif algorithm == "gspo":  # its token form (GSPO-token), the one that takes a weight a token
            value = _clipped(math.exp(-drift) * math.exp(live[t] - frozen[t]), a, knobs)
        else:
            value = _clipped(math.exp(moved[t]), a, knobs)
        value *= weights[t]
        if knobs["opsm_threshold"] > 0 and a < 0 and drift > knobs["opsm_threshold"]:
            value = 0.0
        if knobs["kl_coef"] > 0 and knobs["kl_placement"] == "loss":
            x = log_ratio(live[t], sample["reference_logprobs"][t])
            value += knobs["kl_coef"] * kl(x, knobs["kl_estimator"])
        if knobs["entropy_coef"] > 0:
            value -= knobs["entropy_coef"] * sample["entropy"][t]
        out[t] = value
    return out


def _clipped(ratio: float, a: float, knobs: Knobs) -> float:
    objective = min(ratio * a, clamp(ratio, 1 - knobs["clip_low"], 1 + knobs["clip_high"]) * a)
    if knobs["dual_clip"] and a < 0:
        objective = max(objective, knobs["dual_clip"] * a)
    return -objective


def _weights(knobs: Knobs, rho: Mapping[int, float]) -> dict[int, float]:
    """The importance weights of the trained tokens, from log π_old - log μ."""
    method = knobs["correction"]
    if method == "auto":
        method = "none" if knobs["old_logprobs"] == "rollout" else "tis"
    if method == "none":
        return dict.fromkeys(rho, 1.0)
    if knobs["correction_level"] == "sequence":
        rho = dict.fromkeys(rho, clamp(sum(rho.values()), -LIMIT, LIMIT))
    low, high = knobs["correction_low"], knobs["correction_high"]
    ratios = {t: math.exp(x) for t, x in rho.items()}
    if method == "tis":
        return {t: clamp(r, low, high) for t, r in ratios.items()}
    return {t: r if low <= r <= high else 0.0 for t, r in ratios.items()}


def step_loss(knobs: Knobs, samples: Sequence[Sample], per_token: Sequence[Sequence[float]]) -> float:
    """The step's loss as a mean, as each aggregation's paper writes it, over samples with a trained token."""
    kept = [
        ([x for x, one in zip(values, sample["mask"], strict=True) if one])
        for sample, values in zip(samples, per_token, strict=True)
        if any(sample["mask"])
    ]
    if knobs["aggregation"] == "token_mean":
        return math.fsum(x for values in kept for x in values) / sum(map(len, kept))
    if knobs["aggregation"] == "seq_mean_token_mean":
        return math.fsum(math.fsum(values) / len(values) for values in kept) / len(kept)
    return math.fsum(math.fsum(values) / knobs["norm_length"] for values in kept) / len(kept)


def gradient(algorithm: str, knobs: Knobs, samples: Sequence[Sample], *, step: float = 1e-5) -> list[list[float]]:
    """The step's loss by each log-prob. What stands under a stop-gradient stays where it was."""

    def loss(moved: Sequence[Sample]) -> float:
        return step_loss(knobs, samples, losses(algorithm, knobs, samples, [one["logprobs"] for one in moved]))

    return differences(samples, "logprobs", loss, step=step)


def differences(
    samples: Sequence[Sample], name: str, loss: Callable[[Sequence[Sample]], float], *, step: float = 1e-5
) -> list[list[float]]:
    """A loss by each entry of the samples' lists ``name``, by central differences of fourth order."""

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


def entropy_gradient(algorithm: str, knobs: Knobs, samples: Sequence[Sample]) -> list[list[float]]:
    """The step's loss by each entropy."""

    def loss(moved: Sequence[Sample]) -> float:
        return step_loss(knobs, moved, losses(algorithm, knobs, moved, [sample["logprobs"] for sample in moved]))

    return differences(samples, "entropy", loss)


# -- the critic -----------------------------------------------------------------------------------------------------
def value_losses(knobs: Knobs, samples: Sequence[Sample]) -> list[list[float]]:
    """Of every token: half the larger of the two squared errors, the value's and that of the value held near its old
    one; 0 where it is not trained."""
    out = []
    for sample in samples:
        row = [0.0] * len(sample["mask"])
        for t, one in enumerate(sample["mask"]):
            if not one:
                continue
            value, old, target = sample["values"][t], sample["old_values"][t], sample["returns"][t]
            near = clamp(value, old - knobs["value_clip"], old + knobs["value_clip"]) if knobs["value_clip"] else value
            row[t] = max((value - target) ** 2, (near - target) ** 2) / 2
        out.append(row)
    return out


def value_gradient(knobs: Knobs, samples: Sequence[Sample]) -> list[list[float]]:
    """The critic's loss of the step by each value."""
    return differences(samples, "values", lambda moved: step_loss(knobs, moved, value_losses(knobs, moved)))


def _generalized_advantages(knobs: Knobs, reward: float, sample: Sample) -> list[float]:
    """GAE as a sum, not as a recursion: A_t = Σ_l (γλ)^l δ_{t+l} over the sample's trained tokens."""
    trained = [t for t, one in enumerate(sample["mask"]) if one]
    charges = _charges(knobs, sample)
    rewards = [-charges[t] + (reward if t == trained[-1] else 0.0) for t in trained]
    values = [sample["values"][t] for t in trained] + [0.0]
    deltas = [rewards[i] + knobs["gamma"] * values[i + 1] - values[i] for i in range(len(trained))]
    decay = knobs["gamma"] * knobs["gae_lambda"]
    out = [0.0] * len(sample["mask"])
    for i, t in enumerate(trained):
        out[t] = math.fsum(decay ** (j - i) * deltas[j] for j in range(i, len(trained)))
    return out


# -- advantages -----------------------------------------------------------------------------------------------------
def advantages(algorithm: str, knobs: Knobs, groups: Sequence[Mapping[str, Any]]) -> list[list[list[float]]]:
    """Of every token of every sample of every group of a train step. A group: ``rewards``, and ``samples`` as above."""
    step = [_group_advantages(algorithm, knobs, group["rewards"], group["samples"]) for group in groups]
    if algorithm not in ("reinforce_pp", "ppo"):
        return step
    trained = [
        a
        for group, values in zip(groups, step, strict=True)
        for sample, row in zip(group["samples"], values, strict=True)
        for a, one in zip(row, sample["mask"], strict=True)
        if one
    ]
    mean = math.fsum(trained) / len(trained)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in trained) / len(trained))
    return [[[(a - mean) / (std + knobs["std_epsilon"]) for a in row] for row in values] for values in step]


def returns(knobs: Knobs, group: Mapping[str, Any]) -> list[list[float]]:
    """What PPO's critic learns, of every token of a group: its advantage before whitening, plus the value."""
    raw = _group_advantages("ppo", knobs, group["rewards"], group["samples"])
    return [
        [a + v for a, v in zip(row, sample["values"], strict=True)]
        for row, sample in zip(raw, group["samples"], strict=True)
    ]


def _group_advantages(
    algorithm: str, knobs: Knobs, rewards: Sequence[float], samples: Sequence[Sample]
) -> list[list[float]]:
    if algorithm == "ppo":
        return [_generalized_advantages(knobs, reward, one) for reward, one in zip(rewards, samples, strict=True)]
    charges = [_charges(knobs, sample) for sample in samples]
    if algorithm == "reinforce_pp":
        mean = math.fsum(rewards) / len(rewards) if knobs["group_baseline"] else 0.0
        return [
            [reward - mean - math.fsum(charge[t:]) for t in range(len(charge))]
            for reward, charge in zip(rewards, charges, strict=True)
        ]
    rewards = [reward - math.fsum(charge) for reward, charge in zip(rewards, charges, strict=True)]
    if algorithm == "dapo" and knobs["overlong_length"]:
        longest, buffer = knobs["overlong_length"], knobs["overlong_buffer"]
        rewards = [
            reward + clamp((longest - buffer - len(sample["mask"])) / buffer, -1.0, 0.0)
            for reward, sample in zip(rewards, samples, strict=True)
        ]
    count = len(rewards)
    if algorithm == "rloo":
        values = [
            rewards[i] - math.fsum(rewards[j] for j in range(count) if j != i) / (count - 1) for i in range(count)
        ]
    else:
        mean = math.fsum(rewards) / count
        values = [reward - mean for reward in rewards]
        if algorithm != "dr_grpo" and knobs.get("normalize_std", True):
            std = math.sqrt(math.fsum(value * value for value in values) / (count - 1))
            values = [value / (std + knobs["std_epsilon"]) for value in values]
    return [[value] * len(sample["mask"]) for value, sample in zip(values, samples, strict=True)]


def _charges(knobs: Knobs, sample: Sample) -> list[float]:
    """What each token's KL takes off the reward."""
    if knobs["kl_coef"] == 0 or knobs["kl_placement"] == "loss":
        return [0.0] * len(sample["mask"])
    old = sample["rollout_logprobs"] if knobs["old_logprobs"] != "actor_fwd" else sample["old_logprobs"]
    return [
        knobs["kl_coef"] * kl(log_ratio(old[t], sample["reference_logprobs"][t]), knobs["kl_estimator"]) if one else 0.0
        for t, one in enumerate(sample["mask"])
    ]
