"""Computes distillation in plain Python floats (float64) over full vocabularies, and writes its golden vectors.

python -m tests.conformance.distill_reference

A sample has the format of `reference`. It also has ``teacher_logprobs`` of the sampled tokens, and one list per token
of ``top_logprobs`` and ``teacher_top_logprobs`` at the teacher's top-k tokens.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Mapping, Sequence
from typing import Any

from algorithms.distill import SPEC, DistillConfig
from tests.conformance import advantage_reference, reference
from tests.conformance.cases import VECTORS
from tests.conformance.generate import FIXED, make_turns, rounded, settings_of

FILE = VECTORS / "distill.json"
VOCABULARY = 9
LENGTHS = (4, 1, 3, 2)
Config = Mapping[str, Any]
Sample = Mapping[str, Any]

LOSS_CASES: list[dict[str, Any]] = [
    {"form": "pure"},
    {"form": "advantage", "aggregation": "seq_mean_token_mean"},
    {"form": "topk_forward", "top_k": 3},
    {"form": "topk_reverse", "top_k": 3},
    {"form": "topk_mixed", "top_k": 4, "mix": 0.3, "teacher_coef": 2.0},
    {"form": "topk_jsd", "top_k": 4, "mix": 0.2},
    {"form": "topk_jsd", "top_k": 1, "mix": 0.5, "aggregation": "seq_mean_token_sum_norm", "norm_length": 5.0},
    {"form": "topk_reverse", "top_k": 2, "kl_coef": 0.1, "kl_placement": "loss", "kl_estimator": "k2"},
]
ADVANTAGE_CASES: list[dict[str, Any]] = [
    {"form": "pure", "teacher_coef": 0.5},
    {"form": "advantage"},
    {"form": "advantage", "teacher_coef": 0.1, "normalize_std": "none"},
    {"form": "advantage", "kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
    {"form": "topk_forward"},
    {"form": "pure", "kl_coef": 0.1, "kl_placement": "reward", "kl_estimator": "k2"},
    {"form": "advantage", "credit": "gigpo", "gigpo_weight": 0.5, "gigpo_gamma": 0.8},
]


def log_softmax(logits: Sequence[float]) -> list[float]:
    total = math.log(math.fsum(math.exp(z) for z in logits))
    return [z - total for z in logits]


def kl(left: Sequence[float], right: Sequence[float]) -> float:
    """Returns KL(left ‖ right) of probabilities. A bucket with probability 0 on the left adds 0."""
    return math.fsum(a * (math.log(a) - math.log(b)) for a, b in zip(left, right, strict=True) if a > 0)


def buckets(top_logprobs: Sequence[float]) -> list[float]:
    top = [math.exp(x) for x in top_logprobs]
    return [*top, 1 - math.fsum(top)]


def divergence(student_top: Sequence[float], teacher_top: Sequence[float], form: str, mix: float) -> float:
    q, p = buckets(student_top), buckets(teacher_top)
    if form == "topk_forward":
        return kl(p, q)
    if form == "topk_reverse":
        return kl(q, p)
    if form == "topk_mixed":
        return mix * kl(p, q) + (1 - mix) * kl(q, p)
    middle = [mix * a + (1 - mix) * b for a, b in zip(p, q, strict=True)]
    return mix * kl(p, middle) + (1 - mix) * kl(q, middle)


def losses(
    config: Config, samples: Sequence[Sample], live: Sequence[Sequence[float]], live_top: Sequence[Any]
) -> list[list[float]]:
    """Returns the loss of every token before aggregation. Gradients are with respect to ``live`` and ``live_top``."""
    policy = reference.losses("grpo", config, samples, live)  # PPO's clip and the KL to the reference
    if not config["form"].startswith("topk_"):
        return policy
    out = []
    for sample, values, tops in zip(samples, live, live_top, strict=True):
        row = []
        for t, is_trained in enumerate(sample["mask"]):
            value = 0.0
            if is_trained:
                found = divergence(tops[t], sample["teacher_top_logprobs"][t], config["form"], config["mix"])
                value = config["teacher_coef"] * found
                if config["kl_coef"] > 0 and config["kl_placement"] == "loss":
                    x = reference.log_ratio(values[t], sample["reference_logprobs"][t])
                    value += config["kl_coef"] * reference.kl(x, config["kl_estimator"])
            row.append(value)
        out.append(row)
    return out


def _step_loss(config: Config, samples: Sequence[Sample], live: Any, top: Any) -> float:
    return reference.step_loss(config, samples, losses(config, samples, live, top))


def gradients(config: Config, samples: Sequence[Sample], *, step: float = 1e-5) -> dict[str, Any]:
    """Returns the loss's gradients for the student's sampled log-probs and top log-probs, by central differences."""

    def at(i: int, t: int, k: int | None, by: float) -> float:
        live = [list(sample["logprobs"]) for sample in samples]
        top = [[list(row) for row in sample["top_logprobs"]] for sample in samples]
        if k is None:
            live[i][t] += by
        else:
            top[i][t][k] += by
        return _step_loss(config, samples, live, top)

    def slope(i: int, t: int, k: int | None) -> float:
        near, far = at(i, t, k, step) - at(i, t, k, -step), at(i, t, k, 2 * step) - at(i, t, k, -2 * step)
        return (8 * near - far) / (12 * step)

    return {
        "gradient": [[slope(i, t, None) for t in range(len(sample["mask"]))] for i, sample in enumerate(samples)],
        "top_gradient": [
            [[slope(i, t, k) for k in range(len(row))] for t, row in enumerate(sample["top_logprobs"])]
            for i, sample in enumerate(samples)
        ],
    }


def advantages(config: Config, group: Mapping[str, Any]) -> list[list[float]]:
    """Returns -λ (log π_S - log π_T) plus the group's advantage or minus the KL penalty. Returns 0 for ``topk_…``."""
    samples: Sequence[Sample] = group["samples"]
    if config["form"].startswith("topk_"):
        return [[0.0] * len(sample["mask"]) for sample in samples]
    base = [[-charge for charge in advantage_reference.charges(config, sample)] for sample in samples]
    if config["form"] == "advantage":
        base = advantage_reference.group_advantages("grpo", config, group)
    return [
        [
            a
            - config["teacher_coef"] * reference.log_ratio(sample["rollout_logprobs"][t], sample["teacher_logprobs"][t])
            for t, a in enumerate(row)
        ]
        for sample, row in zip(samples, base, strict=True)
    ]


def make_samples(source: random.Random, *, top_k: int) -> list[dict[str, Any]]:
    samples = []
    for place, length in enumerate(LENGTHS):
        masked = {1} if length > 2 else set(range(length)) if place == 3 else set()
        names = ("logprobs", "old_logprobs", "rollout_logprobs", "reference_logprobs", "teacher_logprobs")
        sample: dict[str, Any] = {
            "mask": [0 if t in masked else 1 for t in range(length)],
            "advantages": [round(source.uniform(-2, 2), 3) for _ in range(length)],
            **{name: [round(source.uniform(-2.0, -0.5), 7) for _ in range(length)] for name in names},
            "top_logprobs": [],
            "teacher_top_logprobs": [],
        }
        for _ in range(length):
            student, teacher = (log_softmax([source.gauss(0, 1.5) for _ in range(VOCABULARY)]) for _ in range(2))
            ids = sorted(range(VOCABULARY), key=lambda v: -teacher[v])[:top_k]
            sample["top_logprobs"].append([round(student[v], 7) for v in ids])
            sample["teacher_top_logprobs"].append([round(teacher[v], 7) for v in ids])
        samples.append(sample)
    return samples


def vectors() -> dict[str, Any]:
    defaults = settings_of(DistillConfig)
    made: dict[str, Any] = {"loss": [], "advantages": []}
    for seed, changes in enumerate(LOSS_CASES):
        config = defaults | changes
        SPEC.check(DistillConfig(**{key: value for key, value in config.items() if key not in FIXED}))
        source = random.Random(f"distill loss {seed}")
        while True:  # draws until the finite differences contain no kink of the clip
            samples = make_samples(source, top_k=config["top_k"])
            found, again = gradients(config, samples), gradients(config, samples, step=5e-5)
            rows = zip(found["gradient"], again["gradient"], strict=True)
            if all(abs(a - b) < 1e-8 for x, y in rows for a, b in zip(x, y, strict=True)):
                break
        live, top = ([sample[name] for sample in samples] for name in ("logprobs", "top_logprobs"))
        expected = {
            "loss": rounded(_step_loss(config, samples, live, top)),
            "per_token": rounded(losses(config, samples, live, top)),
            **{name: rounded(values) for name, values in found.items()},
        }
        made["loss"].append({"config": config, "samples": samples, "expected": expected})
    for seed, changes in enumerate(ADVANTAGE_CASES):
        config, source = defaults | changes, random.Random(f"distill advantages {seed}")
        samples = make_samples(source, top_k=2)
        group = {"rewards": [source.randrange(0, 9) / 8 for _ in LENGTHS], "samples": samples}
        if config["credit"] == "gigpo":
            group = make_turns(source, group)
        made["advantages"].append({"config": config, **group, "expected": rounded(advantages(config, group))})
    return made


def render() -> str:
    made = vectors()
    parts = (f' "{key}": [\n' + ",\n".join("  " + json.dumps(case) for case in made[key]) + "\n ]" for key in made)
    return "{\n" + ",\n".join(parts) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(render(), encoding="utf-8")
