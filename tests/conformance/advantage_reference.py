"""Computes advantages in plain Python floats (float64) without torch, from the papers and independent of our code.

Samples and settings have the format of `reference`. A group has ``samples`` and ``rewards``, one reward per sample.
With turns a group also has ``turns``, one list per sample. A turn has its number of ``tokens``, its ``reward`` and its
``state``.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from tests.conformance.reference import Config, Sample, clamp, kl, log_ratio, weights_of


def advantages(algorithm: str, config: Config, groups: Sequence[Mapping[str, Any]]) -> list[list[list[float]]]:
    """Returns the advantages of every token of every sample of every group of a train step."""
    step = [group_advantages(algorithm, config, group) for group in groups]
    if algorithm in ("reinforce_pp", "ppo"):
        step = _whitened(config, step, groups)
    if config.get("normalize_std") == "batch":
        every = [reward for group in groups for reward in _shaped_rewards(algorithm, config, group)]
        scale = statistics.stdev(every) + config["std_epsilon"]
        step = [[[a / scale for a in row] for row in values] for values in step]
    if config["correction"] == "tis_normalized":
        scale = _mean_weight(config, [sample for group in groups for sample in group["samples"]])
        step = [[[a / scale for a in row] for row in values] for values in step]
    return step


def _mean_weight(config: Config, samples: Sequence[Sample]) -> float:
    """Returns the mean weight of trained tokens, or of samples with trained tokens if a sample has one weight."""
    counted = []
    for sample in samples:
        trained = [t for t, is_trained in enumerate(sample["mask"]) if is_trained]
        rho = {t: log_ratio(sample["old_logprobs"][t], sample["rollout_logprobs"][t]) for t in trained}
        weights = list(weights_of(config, rho).values())
        counted += weights if config["correction_level"] == "token" else weights[:1]
    return math.fsum(counted) / len(counted)


def _whitened(
    config: Config, step: Sequence[Sequence[Sequence[float]]], groups: Sequence[Mapping[str, Any]]
) -> list[list[list[float]]]:
    trained = [
        a
        for group, values in zip(groups, step, strict=True)
        for sample, row in zip(group["samples"], values, strict=True)
        for a, is_trained in zip(row, sample["mask"], strict=True)
        if is_trained
    ]
    mean = math.fsum(trained) / len(trained)
    std = math.sqrt(math.fsum((a - mean) ** 2 for a in trained) / len(trained))
    return [[[(a - mean) / (std + config["std_epsilon"]) for a in row] for row in values] for values in step]


def returns(config: Config, group: Mapping[str, Any]) -> list[list[float]]:
    """Returns the critic's target for every token of a group: the value plus the advantage before whitening, with the λ
    of returns."""
    return [
        [
            a + v
            for a, v in zip(
                _generalized_advantages(config, earned, sample, of_returns=True), sample["values"], strict=True
            )
        ]
        for earned, sample in zip(_earned(group), group["samples"], strict=True)
    ]


def _earned(group: Mapping[str, Any]) -> list[dict[int, float]]:
    """Returns the rewards of each sample by the index of the rewarded token.

    The last trained token of a turn gets the turn's reward. For a turn without trained tokens, the last earlier trained
    token gets the reward. Without turns, the sample's last trained token gets the sample's reward.
    """
    found = []
    for place, sample in enumerate(group["samples"]):
        own: dict[int, float] = {}
        whole = [{"tokens": len(sample["mask"]), "reward": group["rewards"][place]}]
        behind = 0
        for turn in group["turns"][place] if "turns" in group else whole:
            behind += turn["tokens"]
            trained = [t for t in range(behind) if sample["mask"][t]]
            if trained:
                own[trained[-1]] = own.get(trained[-1], 0.0) + turn["reward"]
        found.append(own)
    return found


def _with_gigpo(algorithm: str, config: Config, group: Mapping[str, Any]) -> list[list[float]]:
    """Returns GiGPO's advantages: the episodes' advantages plus the weighted advantages of turns in equal states.

    The key of a turn is (sample, turn number). The return of a turn is R_t = Σ_k γ^(k-t) r_k over this turn and later
    turns. Turns in equal states are compared like the samples of a group, with the returns as rewards.
    """
    of_episodes = _of_episodes(algorithm, config, group)
    own_returns: dict[tuple[int, int], float] = {}
    for i, turns in enumerate(group["turns"]):
        rewards, first = [], 0
        for turn in turns:
            tokens = range(first, first + turn["tokens"])
            kl_of_turn = math.fsum(charges(config, group["samples"][i])[t] for t in tokens)
            rewards.append(turn["reward"] - (0.0 if algorithm == "reinforce_pp" else kl_of_turn))
            first += turn["tokens"]
        if algorithm == "dapo":
            rewards[-1] += _punishment(config, group["samples"][i])
        for k in range(len(turns)):
            later = enumerate(rewards[k:])
            own_returns[i, k] = math.fsum(config["gigpo_gamma"] ** distance * reward for distance, reward in later)
    result = [list(row) for row in of_episodes]
    for state in {turn["state"] for turns in group["turns"] for turn in turns} - {None}:
        anchors = [key for key in own_returns if group["turns"][key[0]][key[1]]["state"] == state]
        if len(anchors) < 2:
            continue
        compared = _compared(algorithm, config, [own_returns[key] for key in anchors])
        for (i, k), value in zip(anchors, compared, strict=True):
            first = sum(turn["tokens"] for turn in group["turns"][i][:k])
            for t in range(first, first + group["turns"][i][k]["tokens"]):
                result[i][t] += config["gigpo_weight"] * value
    return result


def group_advantages(algorithm: str, config: Config, group: Mapping[str, Any]) -> list[list[float]]:
    """Returns the advantages of every token of every sample of a group, before normalization over the step."""
    form = _with_gigpo if config.get("credit") == "gigpo" else _of_episodes
    return form(algorithm, config, group)


def _of_episodes(algorithm: str, config: Config, group: Mapping[str, Any]) -> list[list[float]]:
    rewards, samples = group["rewards"], group["samples"]
    if algorithm == "ppo":
        return [
            _generalized_advantages(config, earned, sample, of_returns=False)
            for earned, sample in zip(_earned(group), samples, strict=True)
        ]
    if algorithm == "reinforce_pp":
        mean = math.fsum(rewards) / len(rewards) if config["group_baseline"] else 0.0
        return [_discounted(config, reward - mean, sample) for reward, sample in zip(rewards, samples, strict=True)]
    values = _compared(algorithm, config, _shaped_rewards(algorithm, config, group))
    return [[value] * len(sample["mask"]) for value, sample in zip(values, samples, strict=True)]


def _compared(algorithm: str, config: Config, rewards: Sequence[float]) -> list[float]:
    """Returns the algorithm's advantages for ``rewards`` to compare: rewards of episodes, or returns of turns."""
    if algorithm == "rloo":
        return _against_the_others(config, rewards)
    if config.get("pass_k", 1) > 1:
        return _pass_at_k(config, rewards)
    mean = math.fsum(rewards) / len(rewards)
    values = [reward - mean for reward in rewards]
    if algorithm not in ("dr_grpo", "reinforce_pp") and config["normalize_std"] == "group":
        values = [value / (statistics.stdev(rewards) + config["std_epsilon"]) for value in values]
    return values


def _shaped_rewards(algorithm: str, config: Config, group: Mapping[str, Any]) -> list[float]:
    """Returns each sample's reward, minus its KL if the reward includes the KL. DAPO also punishes the length."""
    rewards = [
        reward - math.fsum(charges(config, sample))
        for reward, sample in zip(group["rewards"], group["samples"], strict=True)
    ]
    if algorithm == "dapo":
        rewards = [
            reward + _punishment(config, sample) for reward, sample in zip(rewards, group["samples"], strict=True)
        ]
    return rewards


def _punishment(config: Config, sample: Sample) -> float:
    longest, buffer = config["overlong_length"], config["overlong_buffer"]
    return clamp((longest - buffer - len(sample["mask"])) / buffer, -1.0, 0.0) if longest else 0.0


def _discounted(config: Config, reward: float, sample: Sample) -> list[float]:
    """Returns REINFORCE++'s discounted sum for each token: the reward at the last trained token, minus the KL of each
    trained token. γ applies per trained token."""
    charged, gamma, out = charges(config, sample), config["gamma"], []
    for t in range(len(sample["mask"])):
        later = [u for u in range(t, len(sample["mask"])) if sample["mask"][u]]
        value = reward * gamma ** max(0, len(later) - 1)
        out.append(value - math.fsum(gamma**distance * charged[u] for distance, u in enumerate(later)))
    return out


def _against_the_others(config: Config, rewards: Sequence[float]) -> list[float]:
    """Returns RLOO's advantages. NeMo-RL's variant divides by the standard deviation of the other rewards."""
    values = []
    for i, reward in enumerate(rewards):
        other_rewards = [other_reward for j, other_reward in enumerate(rewards) if j != i]
        value = reward - math.fsum(other_rewards) / len(other_rewards)
        if config["normalize_std"] == "group":
            value /= statistics.stdev(rewards) + config["std_epsilon"]
        if config["normalize_std"] == "others" and len(set(other_rewards)) > 1:
            value /= statistics.stdev(other_rewards) + config["std_epsilon"]
        values.append(value)
    return values


def _pass_at_k(config: Config, rewards: Sequence[float]) -> list[float]:
    """Returns the advantages of pass@k training by enumeration: the reward of k samples is their best reward."""
    subsets = list(itertools.combinations(range(len(rewards)), min(config["pass_k"], len(rewards))))
    scores = [max(rewards[i] for i in subset) for subset in subsets]
    mean = math.fsum(scores) / len(scores)
    scale = 1.0
    if config["normalize_std"] == "group":
        scale = statistics.pstdev(scores) + config["std_epsilon"]
    values = []
    for i in range(len(rewards)):
        own = [score for subset, score in zip(subsets, scores, strict=True) if i in subset]
        values.append((math.fsum(own) / len(own) - mean) / scale)
    return values


def charges(config: Config, sample: Sample) -> list[float]:
    """Returns each token's KL penalty. It is subtracted from the reward."""
    if config["kl_coef"] == 0 or config["kl_placement"] != "reward":
        return [0.0] * len(sample["mask"])
    old = sample["rollout_logprobs"] if config["old_logprobs"] != "actor_fwd" else sample["old_logprobs"]
    return [
        config["kl_coef"] * kl(log_ratio(old[t], sample["reference_logprobs"][t]), config["kl_estimator"])
        if is_trained
        else 0.0
        for t, is_trained in enumerate(sample["mask"])
    ]


def _generalized_advantages(
    config: Config, earned: Mapping[int, float], sample: Sample, *, of_returns: bool
) -> list[float]:
    """Returns GAE as a sum, without recursion: A_t = Σ_l (γλ)^l δ_{t+l} over the sample's trained tokens."""
    trained = [t for t, is_trained in enumerate(sample["mask"]) if is_trained]
    charged = charges(config, sample)
    rewards = [-charged[t] + earned.get(t, 0.0) for t in trained]
    values = [sample["values"][t] for t in trained] + [0.0]
    deltas = [rewards[i] + config["gamma"] * values[i + 1] - values[i] for i in range(len(trained))]
    lam = config["gae_lambda"]
    if config["gae_alpha"] > 0 and not of_returns:  # VAPO: Σ_t λ^t = 1 / (1 - λ) must equal α times the length
        lam = max(0.0, 1 - 1 / (config["gae_alpha"] * len(trained))) if trained else 0.0
    decay = config["gamma"] * lam
    out = [0.0] * len(sample["mask"])
    for i, t in enumerate(trained):
        out[t] = math.fsum(decay ** (j - i) * deltas[j] for j in range(i, len(trained)))
    return out
