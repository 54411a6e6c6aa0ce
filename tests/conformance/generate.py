"""Writes the golden vectors from the plain-Python reference.

python -m tests.conformance.generate
"""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

from relax_core.registry import find_algorithm
from tests.conformance import advantage_reference, reference

VECTORS = Path(__file__).parent / "vectors"
LENGTHS = (4, 1, 3, 2, 5)
GROUPS = ((3, 1, 4), (2, 5, 2, 1))
ACTOR_FWD = {"old_logprobs": "actor_fwd", "correction_low": 0.7, "correction_high": 1.4}
COMMON: list[dict[str, Any]] = [
    {},
    {"aggregation": "token_mean", "norm_length": 0.0},
    {"aggregation": "seq_mean_token_mean", "norm_length": 0.0},
    {"aggregation": "seq_mean_token_sum_norm", "norm_length": 6.0},
    {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k3"},
    {"old_logprobs": "current"},
    {**ACTOR_FWD},
    {**ACTOR_FWD, "correction": "none"},
    {**ACTOR_FWD, "correction": "mis"},
    {**ACTOR_FWD, "correction": "icepop"},
    {**ACTOR_FWD, "correction_level": "sequence"},
    {**ACTOR_FWD, "correction": "mis", "correction_level": "sequence"},
    {"opsm_threshold": 1e-4},
    {**ACTOR_FWD, "opsm_threshold": 1e-2, "kl_coef": 0.05, "kl_placement": "loss", "kl_estimator": "k3"},
]
ENTROPY: list[dict[str, Any]] = [
    {"entropy_coef": 0.02},
    {**ACTOR_FWD, "entropy_coef": 0.5, "aggregation": "seq_mean_token_mean", "norm_length": 0.0},
]
FOR_ALL: list[dict[str, Any]] = [
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k3"},
    {**ACTOR_FWD, "kl_coef": 0.1, "kl_placement": "loss_k2_gradient", "kl_estimator": "k3"},
    {**ACTOR_FWD, "correction_level": "geometric", "correction_low": 0.9, "correction_high": 1.1},
    {**ACTOR_FWD, "rejection": {"seq_mean_k3": [0, 0.03]}},
    {"rejection": {"token_ratio": [0.7, 1.4]}},
]
TURNS = "episodes of several turns"  # property of a case, not a setting
WIDE = "spread of the log-probs"  # property of a case, not a setting: log-ratios are large, so a clamp acts
KL_CASES: list[dict[str, Any]] = [
    {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "abs"},
    {"kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k3_clamped", WIDE: 4.0},
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k1"},
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k2"},
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "abs"},
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k3_clamped", WIDE: 4.0},
    {"kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k3", "old_logprobs": "current"},
    {**ACTOR_FWD, "kl_coef": 0.1, "kl_placement": "loss_times_ratio", "kl_estimator": "k3"},
    {"kl_coef": 0.1, "kl_placement": "loss_k2_gradient", "kl_estimator": "k1"},
    {"kl_coef": 0.1, "kl_placement": "loss_k2_gradient", "kl_estimator": "abs"},
    {"kl_coef": 0.1, "kl_placement": "loss_k2_gradient", "kl_estimator": "k3_clamped", WIDE: 4.0},
]
REJECTION_CASES: list[dict[str, Any]] = [
    *({**ACTOR_FWD, "rejection": {f"{scope}_ratio": [0.8, 1.3]}} for scope in ("seq_sum", "seq_mean", "seq_any")),
    *({**ACTOR_FWD, "rejection": {f"{scope}_k1": [-0.2, 0.3]}} for scope in ("token", "seq_sum", "seq_mean")),
    {**ACTOR_FWD, "rejection": {"seq_any_k1": [-0.4, 0.5]}},
    *(
        {**ACTOR_FWD, "rejection": {f"{scope}_{name}": [0, 0.05 * factor]}}
        for name, factor in (("k2", 1.0), ("k3", 0.9))
        for scope in ("token", "seq_sum", "seq_any")
    ),
    {**ACTOR_FWD, "rejection": {"seq_mean_k2": [0, 0.04]}},
    *(
        {**ACTOR_FWD, "rejection": {f"{scope}_difference": [-0.05, 0.06]}}
        for scope in ("token", "seq_sum", "seq_mean", "seq_any")
    ),
    # Token weights without truncation. The rule keeps a sample if its geometric mean is in a narrow range.
    {**ACTOR_FWD, "correction_low": 0.0, "correction_high": 1e9, "rejection": {"seq_mean_ratio": [0.9, 1.15]}},
    # Truncated token weights, and a veto: a token with a too low ratio rejects the complete sample.
    {**ACTOR_FWD, "correction_low": 0.0, "rejection": {"seq_any_ratio": [0.65, 1e9]}},
    {**ACTOR_FWD, "correction": "none", "rejection": {"token_ratio": [0.5, 1.2], "seq_mean_k3": [0, 0.05]}},
    {**ACTOR_FWD, "correction": "tis_normalized", "rejection": {"token_k3": [0, 0.05]}},
    {**ACTOR_FWD, "correction": "mis", "correction_level": "geometric", "correction_low": 0.9, "correction_high": 1.1},
    {"old_logprobs": "current", "rejection": {"seq_mean_k3": [0, 0.05]}},
    {"rejection": {"seq_sum_k3": [0, 0.15]}, "aggregation": "seq_mean_token_mean", "kl_coef": 0.1},
]
TRUST_REGION_CASES: list[dict[str, Any]] = [
    {"trust_region": "probability", "clip_low": 0.05, "clip_high": 0.04},
    {"trust_region": "probability_both", "clip_low": 0.05, "clip_high": 0.04},
    {"trust_region": "probability", "clip_low": 0.1, "clip_high": 0.1, "dual_clip": 1.2},
    {**ACTOR_FWD, "trust_region": "probability", "clip_low": 0.05, "clip_high": 0.05},
]
LATER: dict[str, list[dict[str, Any]]] = {  # after all other cases, because their seeds must not change
    "grpo": KL_CASES + REJECTION_CASES + TRUST_REGION_CASES,
    "ppo": TRUST_REGION_CASES[:1],
    "cispo": [
        {"trust_region": "ratio", "clip_low": 0.2, "clip_high": 0.3},
        {**ACTOR_FWD, "trust_region": "ratio", "clip_low": 0.1, "clip_high": 0.1},
    ],
    "gspo": [{**ACTOR_FWD, "rejection": {"token_k3": [0, 0.05]}}],
}
OWN: dict[str, list[dict[str, Any]]] = {
    "sapo": [{"tau_positive": 2.0, "tau_negative": 4.0}],
    "cispo": [{"clip_low": 0.2, "clip_high": 0.3}],
    "gspo": [{"clip_low": 0.1, "clip_high": 0.15}, {"dual_clip": 1.05}],
}
CLIPPED: list[dict[str, Any]] = [{"clip_low": 0.1, "clip_high": 0.4}, {"dual_clip": 1.5}]
KL_IN_REWARD = {"kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k1"}
ADVANTAGES: dict[str, list[dict[str, Any]]] = {
    "grpo": [{"normalize_std": "none"}],
    "dapo": [{"overlong_length": 4, "overlong_buffer": 3}],
    "reinforce_pp": [{"group_baseline": False}, {"group_baseline": False, **KL_IN_REWARD}],
    "ppo": [{"gamma": 0.9, "gae_lambda": 0.5}, {"gae_lambda": 1.0, **KL_IN_REWARD}, {"gae_lambda": 0.0}],
}
BATCH_STD = {"normalize_std": "batch"}
NORMALIZED = {**ACTOR_FWD, "correction": "tis_normalized"}
LATER_ADVANTAGES: dict[str, list[dict[str, Any]]] = {
    "grpo": [
        BATCH_STD,
        {**BATCH_STD, **KL_IN_REWARD},
        {**KL_IN_REWARD, "kl_estimator": "abs"},
        {**KL_IN_REWARD, "kl_estimator": "k3_clamped"},
        {"pass_k": 2},
        {"pass_k": 3},
        {"pass_k": 2, "normalize_std": "none", **KL_IN_REWARD},
        NORMALIZED,
        {**NORMALIZED, "correction_level": "sequence"},
        {**NORMALIZED, "correction_level": "geometric", **BATCH_STD},
    ],
    "dapo": [BATCH_STD | {"overlong_length": 4, "overlong_buffer": 3}, {"pass_k": 2}],
    "gspo": [BATCH_STD, NORMALIZED],
    "sapo": [BATCH_STD, {"normalize_std": "none"}],
    "cispo": [BATCH_STD, {"normalize_std": "none"}],
    "dr_grpo": [NORMALIZED],
    "rloo": [{"normalize_std": "group"}, {"normalize_std": "others"}, BATCH_STD, NORMALIZED],
    "reinforce_pp": [
        {"gamma": 0.9},
        {"gamma": 0.8, "group_baseline": False},
        {"gamma": 0.8, "group_baseline": False, **KL_IN_REWARD},
        NORMALIZED,
    ],
    "ppo": [{"gae_alpha": 0.4, "gae_lambda": 1.0}, {"gae_alpha": 0.6, "gae_lambda": 0.5, "gamma": 0.9}, NORMALIZED],
}
GIGPO = {"credit": "gigpo", TURNS: True}
FIXED = ("skip_without_advantage", "std_epsilon")  # settings that are constants now
HALF = {"gigpo_weight": 0.5, "gigpo_gamma": 0.8}
BY_TURN: dict[str, list[dict[str, Any]]] = {  # also after all other cases
    "grpo": [
        GIGPO,
        {**GIGPO, **HALF, "normalize_std": "none"},
        {**GIGPO, **BATCH_STD},
        {**GIGPO, **HALF, **KL_IN_REWARD},
        {**GIGPO, "gigpo_gamma": 1.0, **NORMALIZED},
    ],
    "dapo": [{**GIGPO, **HALF, "overlong_length": 4, "overlong_buffer": 3}],
    "gspo": [GIGPO],
    "sapo": [GIGPO],
    "cispo": [{**GIGPO, **HALF}],
    "dr_grpo": [GIGPO, {**GIGPO, **HALF}],
    "rloo": [GIGPO, {**GIGPO, **HALF, "normalize_std": "group"}, {**GIGPO, "normalize_std": "others"}],
    "reinforce_pp": [GIGPO, {**GIGPO, **HALF, "gamma": 0.9}, {**GIGPO, **HALF, **KL_IN_REWARD}],
    "ppo": [
        {TURNS: True},
        {TURNS: True, "gamma": 0.9, "gae_lambda": 0.5},
        {TURNS: True, "gae_lambda": 1.0, **KL_IN_REWARD},
        {TURNS: True, "gae_alpha": 0.4, "gae_lambda": 1.0},
    ],
}
LENGTHS_OF_RUN = {"dr_grpo": {"norm_length": 8.0}, "rloo": {"norm_length": 1.0}}  # conf/algo takes them from the run
VALUE: list[dict[str, Any]] = [
    {},
    {"value_clip": 0.0},
    {"aggregation": "seq_mean_token_mean"},
    {"aggregation": "seq_mean_token_sum_norm", "norm_length": 6.0},
]
ONE_UPDATE = {"mini_batches": 1, "epochs": 1}  # the number of updates per batch does not change the maths


def rounded(values: Any) -> Any:
    """Rounds to twelve significant digits. A difference quotient of the reference has about nine digits."""
    return [rounded(value) for value in values] if isinstance(values, list) else float(f"{values:.12g}")


def make_samples(
    source: random.Random, lengths: tuple[int, ...], *, spread: float, advantages: bool
) -> list[dict[str, Any]]:
    """Returns samples with some masked tokens, and one masked sample. ``spread`` is the range of the log-probs."""
    samples = []
    for place, length in enumerate(lengths):
        base = [source.uniform(-3.0, -0.5) for _ in range(length)]

        def near(centre: list[float] = base) -> list[float]:
            return [round(min(-1e-3, value + source.uniform(-spread, spread)), 7) for value in centre]

        masked = {2} if length > 2 and place % 2 == 0 else set(range(length)) if place == 3 else set()
        sample = {
            "mask": [0 if t in masked else 1 for t in range(length)],
            **({"advantages": [round(source.uniform(-2, 2), 3)] * length} if advantages else {}),
            **{
                name: near()
                for name in ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs")
                if advantages or name != "logprobs"
            },
        }
        samples.append(sample)
    return samples


def loss_case(algorithm: str, config: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Draws inputs until the finite differences contain no kink of the loss."""
    source = random.Random(seed)
    spread = config.pop(WIDE, 0.5)
    if algorithm == "gspo" and config["clip_low"] < 0.01 and seed % 2:
        spread = 1e-3
    while True:
        samples = make_samples(source, LENGTHS, spread=spread, advantages=True)
        if config["entropy_coef"]:
            samples = [sample | {"entropy": numbers(source, len(sample["mask"]), 0.1, 3.0)} for sample in samples]
        gradient = reference.gradient(algorithm, config, samples)
        again = reference.gradient(algorithm, config, samples, step=5e-5)
        if all(abs(a - b) < 1e-8 for x, y in zip(gradient, again, strict=True) for a, b in zip(x, y, strict=True)):
            break
    per_token = reference.losses(algorithm, config, samples, [sample["logprobs"] for sample in samples])
    expected = {
        "loss": rounded(reference.step_loss(config, samples, per_token)),
        "per_token": rounded(per_token),
        "gradient": rounded(gradient),
    }
    if config["entropy_coef"]:
        expected["entropy_gradient"] = rounded(reference.entropy_gradient(algorithm, config, samples))
    return {"config": config, "samples": samples, "expected": expected}


def value_case(config: dict[str, Any], *, seed: int) -> dict[str, Any]:
    """Draws values inside and outside the clip's range, such that finite differences contain no edge and no tie."""
    source = random.Random(seed)
    samples = []
    for sample in make_samples(source, LENGTHS, spread=0.5, advantages=True):
        count = len(sample["mask"])
        old = numbers(source, count, -1.0, 1.0)
        samples.append(
            {
                "mask": sample["mask"],
                "old_values": old,
                "values": [round(value + source.choice((-0.5, -0.3, -0.1, 0.1, 0.3, 0.5)), 7) for value in old],
                "returns": numbers(source, count, -1.5, 1.5),
            }
        )
    per_token = reference.value_losses(config, samples)
    expected = {
        "loss": rounded(reference.step_loss(config, samples, per_token)),
        "per_token": rounded(per_token),
        "gradient": rounded(reference.value_gradient(config, samples)),
    }
    return {"config": config, "samples": samples, "expected": expected}


def numbers(source: random.Random, count: int, low: float, high: float) -> list[float]:
    return [round(source.uniform(low, high), 7) for _ in range(count)]


def make_turns(source: random.Random, group: dict[str, Any]) -> dict[str, Any]:
    """Returns the group with one to three turns per sample, in few states. Turn rewards sum to the sample's reward."""
    turns = []
    for sample in group["samples"]:
        left, own = len(sample["mask"]), []
        while left:
            count = left if len(own) == 2 else source.randint(1, left)
            own.append({"tokens": count, "reward": source.randrange(0, 5) / 8, "state": source.choice("ab")})
            left -= count
        turns.append(own)
    turns[0][0]["state"] = "seen once"
    for own in turns[1:]:
        own[-1]["state"] = source.choice([own[-1]["state"], None])  # a truncated response has no state from the env
    return group | {"turns": turns, "rewards": [sum(turn["reward"] for turn in own) for own in turns]}


def advantage_case(algorithm: str, config: dict[str, Any], *, seed: int) -> dict[str, Any]:
    source, has_turns = random.Random(seed), config.pop(TURNS, False)
    groups = [
        {
            "rewards": [source.randrange(0, 9) / 8 for _ in lengths],
            "samples": make_samples(source, lengths, spread=0.5, advantages=False),
        }
        for lengths in GROUPS
    ]
    if has_turns:
        groups = [make_turns(source, group) for group in groups]
    if algorithm != "ppo":
        return {
            "config": config,
            "groups": groups,
            "expected": rounded(advantage_reference.advantages(algorithm, config, groups)),
        }
    for group in groups:
        group["samples"] = [
            sample | {"values": numbers(source, len(sample["mask"]), -0.5, 1.0)} for sample in group["samples"]
        ]
    return {
        "config": config,
        "groups": groups,
        "expected": rounded(advantage_reference.advantages(algorithm, config, groups)),
        "returns": rounded([advantage_reference.returns(config, group) for group in groups]),
    }


def settings_of(config: type[Any]) -> dict[str, Any]:
    """Returns all settings of a case, including defaults and settings that are constants now."""
    fixed = {"skip_without_advantage": True}
    return asdict(config()) | fixed | ({"std_epsilon": config.std_epsilon} if hasattr(config, "std_epsilon") else {})


def vectors(algorithm: str) -> dict[str, Any]:
    """Returns all cases of an algorithm. Every case has all settings, so no case depends on a default."""
    spec = find_algorithm(algorithm)
    defaults = settings_of(spec.config)
    own = OWN.get(algorithm, []) + (CLIPPED if "dual_clip" in defaults and algorithm != "gspo" else [])
    defaults |= ONE_UPDATE | LENGTHS_OF_RUN.get(algorithm, {})
    for_loss = [defaults | changes for changes in COMMON + own + ENTROPY + FOR_ALL + LATER.get(algorithm, [])]
    own_advantages = ADVANTAGES.get(algorithm, []) + LATER_ADVANTAGES.get(algorithm, []) + BY_TURN[algorithm]
    for_advantages = [defaults | changes for changes in [{}, KL_IN_REWARD, *own_advantages]]
    for_value = [defaults | changes for changes in VALUE] if spec.value_loss is not None else []
    for config in for_loss + for_advantages + for_value:
        spec.check(spec.config(**{key: value for key, value in config.items() if key not in (WIDE, TURNS, *FIXED)}))
    made = {
        "algorithm": algorithm,
        "loss": [loss_case(algorithm, config, seed=seed) for seed, config in enumerate(for_loss)],
        "advantages": [advantage_case(algorithm, config, seed=seed) for seed, config in enumerate(for_advantages)],
    }
    if for_value:
        made["value"] = [value_case(config, seed=seed) for seed, config in enumerate(for_value)]
    return made


def render(algorithm: str) -> str:
    """Returns JSON with one case per line. A diff then shows the changed cases."""
    made = vectors(algorithm)

    def lines(key: str) -> str:
        return ",\n".join("  " + json.dumps(case) for case in made[key])

    parts = ",\n".join(f' "{key}": [\n{lines(key)}\n ]' for key in made if key != "algorithm")
    return f'{{\n "algorithm": "{algorithm}",\n{parts}\n}}\n'


def main() -> None:
    for algorithm in reference.ALGORITHMS:
        (VECTORS / f"{algorithm}.json").write_text(render(algorithm), encoding="utf-8")


if __name__ == "__main__":
    main()
