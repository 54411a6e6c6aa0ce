"""Advantages in plain Python floats (float64), written from the papers and not from our code. No torch.

Samples and knobs are those of `reference`; a group has ``rewards``, one a sample, and ``samples``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conformance.reference import Knobs, Sample, clamp, kl, log_ratio, weights_of


def advantages(algorithm: str, knobs: Knobs, groups: Sequence[Mapping[str, Any]]) -> list[list[list[float]]]:
    """Of every token of every sample of every group of a train step. A group: ``rewards``, and ``samples`` as above."""
    step = [group_advantages(algorithm, knobs, group["rewards"], group["samples"]) for group in groups]
    if algorithm in ("reinforce_pp", "ppo"):
        step = _whitened(knobs, step, groups)
    if knobs.get("normalize_std") == "batch":
        every = [reward for group in groups for reward in _shaped_rewards(algorithm, knobs, group)]
        scale = statistics.stdev(every) + knobs["std_epsilon"]
        step = [[[a / scale for a in row] for row in values] for values in step]
    if knobs["correction"] == "tis_normalized":
        scale = _mean_weight(knobs, [sample for group in groups for sample in group["samples"]])
        step = [[[a / scale for a in row] for row in values] for values in step]
    return step


def _mean_weight(knobs: Knobs, samples: Sequence[Sample]) -> float:
    """Of all trained tokens; where a sample has one weight, of all samples with a trained token."""
    counted = []
    for sample in samples:
        trained = [t for t, one in enumerate(sample["mask"]) if one]
        rho = {t: log_ratio(sample["old_logprobs"][t], sample["rollout_logprobs"][t]) for t in trained}
        weights = list(weights_of(knobs, rho).values())
        counted += weights if knobs["correction_level"] == "token" else weights[:1]
    return math.fsum(counted) / len(counted)


def _whitened(
    knobs: Knobs, step: Sequence[Sequence[Sequence[float]]], groups: Sequence[Mapping[str, Any]]
) -> list[list[list[float]]]:
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
    """What PPO's critic learns, of every token of a group: its advantage before whitening with the returns' λ, plus the
    value."""
    return [
        [
            a + v
            for a, v in zip(
                _generalized_advantages(knobs, reward, sample, of_returns=True), sample["values"], strict=True
            )
        ]
        for reward, sample in zip(group["rewards"], group["samples"], strict=True)
    ]


def group_advantages(
    algorithm: str, knobs: Knobs, rewards: Sequence[float], samples: Sequence[Sample]
) -> list[list[float]]:
    if algorithm == "ppo":
        return [
            _generalized_advantages(knobs, reward, one, of_returns=False)
            for reward, one in zip(rewards, samples, strict=True)
        ]
    if algorithm == "reinforce_pp":
        mean = math.fsum(rewards) / len(rewards) if knobs["group_baseline"] else 0.0
        return [_discounted(knobs, reward - mean, sample) for reward, sample in zip(rewards, samples, strict=True)]
    rewards = _shaped_rewards(algorithm, knobs, {"rewards": rewards, "samples": samples})
    if algorithm == "rloo":
        values = _against_the_others(knobs, rewards)
    elif knobs.get("pass_k", 1) > 1:
        values = _pass_at_k(knobs, rewards)
    else:
        mean = math.fsum(rewards) / len(rewards)
        values = [reward - mean for reward in rewards]
        if algorithm != "dr_grpo" and knobs["normalize_std"] == "group":
            values = [value / (statistics.stdev(rewards) + knobs["std_epsilon"]) for value in values]
    return [[value] * len(sample["mask"]) for value, sample in zip(values, samples, strict=True)]


def _shaped_rewards(algorithm: str, knobs: Knobs, group: Mapping[str, Any]) -> list[float]:
    """Each sample's reward less its KL where that belongs there; of DAPO also punished for its length."""
    rewards = [
        reward - math.fsum(charges(knobs, sample))
        for reward, sample in zip(group["rewards"], group["samples"], strict=True)
    ]
    if algorithm == "dapo" and knobs["overlong_length"]:
        longest, buffer = knobs["overlong_length"], knobs["overlong_buffer"]
        rewards = [
            reward + clamp((longest - buffer - len(sample["mask"])) / buffer, -1.0, 0.0)
            for reward, sample in zip(rewards, group["samples"], strict=True)
        ]
    return rewards


def _discounted(knobs: Knobs, reward: float, sample: Sample) -> list[float]:
    """REINFORCE++: at each token what is still to come, the reward at the last trained token and the KL of each trained
    one, where a trained token later counts γ times as much."""
    charged, gamma, out = charges(knobs, sample), knobs["gamma"], []
    for t in range(len(sample["mask"])):
        later = [u for u in range(t, len(sample["mask"])) if sample["mask"][u]]
        value = reward * gamma ** max(0, len(later) - 1)
        out.append(value - math.fsum(gamma**distance * charged[u] for distance, u in enumerate(later)))
    return out


def _against_the_others(knobs: Knobs, rewards: Sequence[float]) -> list[float]:
    """RLOO, and NeMo-RL's division by the standard deviation of the others."""
    values = []
    for i, reward in enumerate(rewards):
        others = [one for j, one in enumerate(rewards) if j != i]
        value = reward - math.fsum(others) / len(others)
        if knobs["normalize_std"] == "group":
            value /= statistics.stdev(rewards) + knobs["std_epsilon"]
        if knobs["normalize_std"] == "others" and len(set(others)) > 1:
            value /= statistics.stdev(others) + knobs["std_epsilon"]
        values.append(value)
    return values


def _pass_at_k(knobs: Knobs, rewards: Sequence[float]) -> list[float]:
    """Pass@k training by enumeration: every k samples are scored by their best."""
    subsets = list(itertools.combinations(range(len(rewards)), min(knobs["pass_k"], len(rewards))))
    scores = [max(rewards[i] for i in subset) for subset in subsets]
    mean = math.fsum(scores) / len(scores)
    scale = 1.0
    if knobs["normalize_std"] == "group":
        scale = statistics.pstdev(scores) + knobs["std_epsilon"]
    values = []
    for i in range(len(rewards)):
        own = [score for subset, score in zip(subsets, scores, strict=True) if i in subset]
        values.append((math.fsum(own) / len(own) - mean) / scale)
    return values


def charges(knobs: Knobs, sample: Sample) -> list[float]:
    """What each token's KL takes off the reward."""
    if knobs["kl_coef"] == 0 or knobs["kl_placement"] != "reward":
        return [0.0] * len(sample["mask"])
    old = sample["rollout_logprobs"] if knobs["old_logprobs"] != "actor_fwd" else sample["old_logprobs"]
    return [
        knobs["kl_coef"] * kl(log_ratio(old[t], sample["reference_logprobs"][t]), knobs["kl_estimator"]) if one else 0.0
        for t, one in enumerate(sample["mask"])
    ]


def _generalized_advantages(knobs: Knobs, reward: float, sample: Sample, *, of_returns: bool) -> list[float]:
    """GAE as a sum, not as a recursion: A_t = Σ_l (γλ)^l δ_{t+l} over the sample's trained tokens."""
    trained = [t for t, one in enumerate(sample["mask"]) if one]
    charged = charges(knobs, sample)
    rewards = [-charged[t] + (reward if t == trained[-1] else 0.0) for t in trained]
    values = [sample["values"][t] for t in trained] + [0.0]
    deltas = [rewards[i] + knobs["gamma"] * values[i + 1] - values[i] for i in range(len(trained))]
    lam = knobs["gae_lambda"]
    if knobs["gae_alpha"] > 0 and not of_returns:  # VAPO: Σ_t λ^t = 1 / (1 - λ) is to be α times the length
        lam = max(0.0, 1 - 1 / (knobs["gae_alpha"] * len(trained))) if trained else 0.0
    decay = knobs["gamma"] * lam
    out = [0.0] * len(sample["mask"])
    for i, t in enumerate(trained):
        out[t] = math.fsum(decay ** (j - i) * deltas[j] for j in range(i, len(trained)))
    return out
