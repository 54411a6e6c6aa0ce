"""Builds and writes summary.json, which has the metrics of a run. docs/summary.md describes each field.

A finding is a sentence about a problem that the metrics show. Findings are printed at the end of a run, and during a
run that learns nothing.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from relax_core.config.choices import TEXT
from relax_core.config.notify_rules import Rule
from relax_core.contracts.bus import BusProgress, ModalityCounts
from relax_core.contracts.env import REWARDED_ENDS
from relax_core.observe.event_log import ACTOR, EVAL, ROLLOUT, MetricRecord, by_step, without_undone

SUMMARY_FILE = "summary.json"
WARM_UP_STEPS = 5  # means and medians leave out the first steps, because caches fill and pools grow
STEP_PARTS = ("wait", "bus", "logprobs", "decode", "train", "sync", "checkpoint")  # consecutive parts of a train step
ENGINE_FIELDS = ("engines", "operations")  # fields of a run with a gateway
OWN_FIELDS = (
    *("outcome", "wall_s", "first_step_s", "recoveries", "stragglers", "records_dropped", "bad_rows", "keep_best"),
    *ENGINE_FIELDS,
)
MEAN_STEPS = 10  # "first" and "last" are means over this number of steps
QUANTILES = ("p10", "p50", "p90")

Values = Mapping[str, float]


def build_summary(records: Iterable[MetricRecord], *, progress: BusProgress, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary of a run as docs/summary.md describes it.

    A metric without data is None. ``records`` are all records, in order. ``meta`` has these fields: wall_s and
    first_step_s in seconds (None if no step was finished), outcome ("finished", "stopped" or "failed: <first cause>"),
    and further `OWN_FIELDS` that apply. All remaining fields of ``meta`` are written under "run". The report reads the
    overrides from there.
    """
    outcome = meta["outcome"]
    assert outcome in ("finished", "stopped") or outcome.startswith("failed: "), outcome
    held = without_undone(records)
    by_train_step, evaluations = by_step(held, ACTOR), by_step(held, EVAL)
    actor = list(by_train_step.values())
    settled = actor[WARM_UP_STEPS:]
    prompt_batches = [record.values for record in held if record.source == ROLLOUT]
    episodes = episode_results(prompt_batches)
    judges = judge_results(prompt_batches)
    checks = [dict(record.values) for record in held if record.source == JUDGE_CHECK]
    modalities = modality_results(progress.ledger.modalities, actor, prompt_batches)
    return {
        "outcome": outcome,
        "findings": [*findings(by_train_step, evaluations), *unfair_shares(modalities)],
        "steps": progress.version,
        "steps_recorded": len(actor),
        "wall_s": meta["wall_s"],
        "first_step_s": meta["first_step_s"],
        "samples_per_s": _median([_rate(values, "samples") for values in settled]),
        "tokens_per_s": _median([_rate(values, "tokens") for values in settled]),
        "reward": _first_and_last(actor, "reward") | _spread(actor, "reward") | {"std": _last(actor, "reward/std")},
        "exact": _first_and_last(actor, "exact"),
        "loss": _first_and_last(actor, "loss"),
        "response_tokens": _first_and_last(actor, "response_tokens")
        | _spread(actor, "response_tokens")
        | {quantile: _last(actor, f"response_tokens/{quantile}") for quantile in QUANTILES},
        "truncated": _first_and_last(actor, "truncated"),
        "groups_without_signal": _first_and_last(actor, "groups_without_signal"),
        "shadow": _shadow(by_train_step),
        "entropy": _first_and_last(actor, "entropy"),
        "eval": [_evaluation(step, values) for step, values in evaluations.items()],
        "best": _best(evaluations, meta.get("keep_best")),
        "staleness": _staleness(progress.staleness_histogram),
        "ledger": {
            "issued": progress.ledger.issued,
            "trained": progress.ledger.trained,
            "dropped": dict(progress.ledger.dropped),
            "open": progress.ledger.open,
            "lost": progress.ledger.lost,
            "trained_twice": progress.ledger.trained_twice,
        },
        **({"modalities": modalities} if modalities else {}),
        **({"episodes": episodes} if episodes else {}),
        "rewards": reward_results(prompt_batches),
        **({"judges": judges} if judges else {}),
        **({"judge_check": checks[-1]} if checks else {}),
        "bad_rows": list(meta.get("bad_rows", ())),
        "logprob_gap": _logprob_gap(actor),
        "step_ms": _step_ms(settled, prompt_batches[WARM_UP_STEPS:]),
        **{name: list(meta.get(name, ())) for name in ("recoveries", "stragglers")},
        **{name: meta[name] for name in ENGINE_FIELDS if name in meta},
        "records_dropped": dict(meta.get("records_dropped", {})),
        "run": {key: value for key, value in meta.items() if key not in OWN_FIELDS},
        "versions": library_versions(),
    }


def write_summary(run_dir: Path, summary: Mapping[str, Any]) -> Path:
    """Writes ``run_dir/summary.json`` completely or not at all, and returns its path.

    NaN and infinities become null.
    """
    path = run_dir / SUMMARY_FILE
    partial = path.with_name(path.name + ".partial")
    with partial.open("w", encoding="utf-8") as file:
        json.dump(_finite(summary), file, indent=2, ensure_ascii=False, allow_nan=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    return path


def library_versions() -> dict[str, str]:
    """Returns the versions of Python, of every installed library by normalised name, and of Relax as "relax"."""
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        found.setdefault(name, distribution.version)
    found["relax"] = found.pop("relax-core", "source tree, not installed")
    return dict(sorted(found.items()))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _shadow(actor: Mapping[int, Values]) -> dict[str, Any] | None:
    """Returns the metrics of the shadow reward, or None if no shadow reward scored an answer.

    ``exact`` and ``gap`` are means over the scored answers. ``denied`` is the share of answers rated wrong by the
    shadow reward, among the answers rated right by the reward. ``usual`` is the value of ``denied`` in the first steps.
    ``onset`` is the train step when ``denied`` began to rise.
    """
    values = list(actor.values())
    if not any("reward_shadow" in record for record in values):
        return None
    onsets = [int(record["hack_onset"]) for record in values if "hack_onset" in record]
    return {
        "exact": _first_and_last(values, "reward_shadow"),
        "gap": _first_and_last(values, "reward_shadow_gap"),
        "denied": _last(values, "shadow_denied"),
        "usual": _last(values, "shadow_denied/usual"),
        "onset": min(onsets, default=None),
    }


def _rate(values: Values, name: str) -> float | None:
    if name not in values or not values.get("step_ms"):
        return None
    return 1e3 * values[name] / values["step_ms"]


def _first_and_last(actor: Sequence[Values], name: str) -> dict[str, float | None]:
    known = [values[name] for values in actor if name in values]
    return {"first": fmean(known[:MEAN_STEPS]) if known else None, "last": _last(actor, name)}


def _last(actor: Sequence[Values], name: str) -> float | None:
    """Returns the mean over the last `MEAN_STEPS` steps with a value."""
    known = [values[name] for values in actor if name in values]
    return fmean(known[-MEAN_STEPS:]) if known else None


def _spread(actor: Sequence[Values], name: str) -> dict[str, float | None]:
    """Returns the smallest and the largest value of all samples of all steps."""
    return {
        "min": min((values[f"{name}/min"] for values in actor if f"{name}/min" in values), default=None),
        "max": max((values[f"{name}/max"] for values in actor if f"{name}/max" in values), default=None),
    }


def _best(evaluations: Mapping[int, Values], metric: str | None) -> dict[str, Any] | None:
    """Returns the first evaluation with the highest value of the metric run.keep_best."""
    name = (metric or "").removeprefix(f"{EVAL}/")
    known = {step: values[name] for step, values in evaluations.items() if name in values}
    if not known:
        return None
    step = max(sorted(known), key=lambda version: known[version])
    return {"metric": metric, "step": step, "value": known[step]}


def _evaluation(step: int, values: Values) -> dict[str, Any]:
    """Returns the metrics of an evaluation. Metrics that only some evaluations have are under "figures"."""
    counts = {name: int(values.get(name, 0)) for name in ("rows", "bad_rows", "unscored")}
    own = {"step": step, "exact": values.get("exact"), "reward": values.get("reward"), **counts}
    return {**own, "figures": {name: value for name, value in values.items() if name not in own}}


def _staleness(histogram: Mapping[int, int]) -> dict[str, Any]:
    seen = {staleness: count for staleness, count in sorted(histogram.items()) if count}
    return {"max": max(seen, default=None), "histogram": {str(staleness): count for staleness, count in seen.items()}}


def _logprob_gap(actor: Sequence[Values]) -> dict[str, float | None]:
    measured = [values for values in actor if values.get("logprob_gap_tokens")]
    tokens = sum(int(values["logprob_gap_tokens"]) for values in measured)
    if not measured:
        return {"max": None, "mean": None, "tokens": 0}
    total = sum(values["logprob_gap_mean"] * values["logprob_gap_tokens"] for values in measured)
    return {"max": max(values["logprob_gap_max"] for values in measured), "mean": total / tokens, "tokens": tokens}


def _step_ms(settled: Sequence[Values], prompt_batches: Sequence[Values]) -> dict[str, float | None]:
    """Returns the mean milliseconds of a train step and its parts. The parts and "other" add up to "total".

    Rollout runs in parallel and is not part of "total".
    """
    timed = [values for values in settled if "step_ms" in values]
    rollout = [values["generate_ms"] for values in prompt_batches if "generate_ms" in values]
    split: dict[str, float | None] = dict.fromkeys(("total", *STEP_PARTS, "other"))
    if timed:
        total = fmean(values["step_ms"] for values in timed)
        # Older versions of Relax did not record every part. The time of a missing part is in "other".
        parts = {part: fmean(values.get(f"{part}_ms", 0.0) for values in timed) for part in STEP_PARTS}
        split = {"total": total, **parts, "other": total - sum(parts.values())}
    return {**split, "rollout": fmean(rollout) if rollout else None}


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- Findings ----------------------------------------------------------------------------------------------------------

WINDOW = 10  # number of steps in a mean
NOISE = 5.0  # a reward drop is reported above this many standard errors of a difference between two windows
LOST_SHARE = 1 / 3  # a reward drop is reported above this share of the gain before the drop
EVAL_NOISE = 3.0  # an accuracy drop is reported above this many standard errors
EVAL_FALL = 0.03
MAX_GROUPS_WITHOUT_SIGNAL = 0.5
MOSTLY_RIGHT = 0.5  # above this share of exact answers, equal rewards mean that the model has learnt the prompts


def findings(actor: Mapping[int, Values], evaluations: Mapping[int, Values]) -> list[str]:
    """Returns one sentence for each problem of the run. Empty for a healthy run.

    ``actor`` maps train steps to the trainer's values. ``evaluations`` maps weight versions to the values of
    evaluations.
    """
    return [
        *_of_shadow(actor),
        *_of_rewards(actor),
        *_of_evaluations(evaluations),
        *_of_the_last_steps(list(actor.values())[-WINDOW:]),
    ]


MAX_USUAL_DENIED = 0.5  # share of the right answers that a shadow reward may rate as wrong from the start


def _of_shadow(actor: Mapping[int, Values]) -> Iterator[str]:
    """Checks whether the model exploits the reward: the shadow reward rates many right answers as wrong."""
    noticed = [(step, values) for step, values in actor.items() if "hack_onset" in values]
    if noticed:
        step, values = noticed[-1]
        yield (
            f"Since train step {values['hack_onset']:.0f} the model learned answers that the reward accepts and "
            f"the shadow reward rejects: it rejected {values['shadow_denied']:.0%} of them at step {step}, and "
            f"{values['shadow_denied/usual']:.0%} in the first steps. Do not trust the accuracy."
        )
    usual = next((values["shadow_denied/usual"] for values in actor.values() if "shadow_denied/usual" in values), 0.0)
    if usual > MAX_USUAL_DENIED:
        yield (
            f"From the first steps on, the shadow reward rejected {usual:.0%} of the answers that the reward accepts. "
            "Either the model has exploited the reward from the start, or the shadow reward cannot read these answers: "
            "look at some, and use a stricter reward or another reward.shadow."
        )


def _of_rewards(actor: Mapping[int, Values]) -> Iterator[str]:
    """Checks whether the reward dropped.

    A drop is the mean of the best window minus the mean of the last window. It is reported above `LOST_SHARE` of the
    gain up to the best window, if it is also above `NOISE` standard errors.
    """
    known = [
        (step, values["reward"]) for step, values in actor.items() if math.isfinite(values.get("reward", math.nan))
    ]
    if len(known) < 2 * WINDOW:
        return
    rewards = [reward for _, reward in known]
    means = [fmean(rewards[start : start + WINDOW]) for start in range(len(rewards) - WINDOW + 1)]
    best = max(range(len(means)), key=means.__getitem__)
    first, highest, last = means[0], means[best], means[-1]
    # Differences of consecutive steps have twice the variance of independent noise.
    noise = math.sqrt(fmean((after - before) ** 2 for before, after in pairwise(rewards)) / 2)
    lost = highest - last
    if lost > LOST_SHARE * (highest - first) and lost > NOISE * noise * math.sqrt(2 / WINDOW):
        steps = f"steps {known[best][0]} to {known[best + WINDOW - 1][0]}"
        yield f"The reward fell from {highest:.3f} ({steps}) to {last:.3f} in the last {WINDOW} steps."


def _of_evaluations(evaluations: Mapping[int, Values]) -> Iterator[str]:
    """Checks whether the held-out accuracy fell by more than `EVAL_FALL` and by more than the sampling error."""
    if len(evaluations) < 2 or not all("exact" in values for values in evaluations.values()):
        return
    best = max(evaluations, key=lambda step: evaluations[step]["exact"])
    last = max(evaluations)
    high, low, prompts = evaluations[best]["exact"], evaluations[last]["exact"], evaluations[last]["rows"]
    middle = (high + low) / 2
    if high - low > max(EVAL_FALL, EVAL_NOISE * math.sqrt(2 * middle * (1 - middle) / max(1.0, prompts))):
        yield f"The held-out accuracy fell from {high:.3f} at step {best} to {low:.3f} at step {last}."


def _of_the_last_steps(newest: Sequence[Values]) -> Iterator[str]:
    if not newest:
        return
    if all(values.get("truncated") == 1.0 for values in newest):
        yield f"No answer of the last {len(newest)} steps ended by itself: all were cut at rollout.max_new_tokens."
    equal = [values["groups_without_signal"] for values in newest if "groups_without_signal" in values]
    exact = fmean(values.get("exact", 0.0) for values in newest)
    if equal and fmean(equal) > MAX_GROUPS_WITHOUT_SIGNAL and exact < MOSTLY_RIGHT:
        yield (
            f"In {fmean(equal):.0%} of the groups of the last {len(newest)} steps all rewards were equal, with "
            f"{exact:.0%} of the answers right: there was almost no learning signal."
        )


# Rules in the syntax of `notify.rules`. The run logs a line when a rule becomes true.
HACK = "actor/hack_onset"
SIGNAL_RULES = (
    "actor/truncated >= 1 for 20 steps",
    f"actor/groups_without_signal > {MAX_GROUPS_WITHOUT_SIGNAL} for 20 steps",
    f"{HACK} >= 0 for 1 step",
    f"actor/shadow_denied/usual > {MAX_USUAL_DENIED} for 1 step",
)


def signal_line(rule: Rule, record: MetricRecord, *, max_new_tokens: int) -> str:
    """Returns advice for a rule of `SIGNAL_RULES` that became true with the trainer's ``record``.

    ``max_new_tokens`` is the limit of an answer, in tokens.
    """
    if rule.number in (HACK, "actor/shadow_denied/usual"):
        return next(_of_shadow({record.step: record.values}))
    when = f"for {rule.steps} train steps, to step {record.step}"
    if rule.number == "actor/truncated":
        return (
            f"All answers were cut at rollout.max_new_tokens={max_new_tokens} {when}, so no reward got a whole answer. "
            "Raise rollout.max_new_tokens, or check that the model's end tokens match the end of an answer in its chat "
            "template."
        )
    exact = record.values.get("exact", 0.0)
    if exact >= MOSTLY_RIGHT:
        cause = (
            f"{exact:.0%} of the answers are right, so there is little left to learn from these prompts. Use harder "
            "prompts, or end the run here."
        )
    else:
        cause = (
            "such a group has no advantage and no gradient. Try algo=dapo, which skips such groups, a larger "
            "algo.group_size, a higher rollout.temperature, other prompts, or a reward with more grades."
        )
    return f"In most groups all rewards were equal {when}: {cause}"


FIRST_STEPS = 5
MAX_FIRST_GROUPS = 0.75


def first_steps_line(first: Sequence[Values], *, temperature: float, group_size: int) -> str | None:
    """Returns advice if at least `MAX_FIRST_GROUPS` of the groups of the first steps had no learning signal, else None.

    ``first`` are the trainer's values of the first `FIRST_STEPS` train steps. The remaining arguments are settings of
    the run.
    """
    equal = [values["groups_without_signal"] for values in first if "groups_without_signal" in values]
    if not equal or fmean(equal) < MAX_FIRST_GROUPS:
        return None
    exact = fmean(values.get("exact", 0.0) for values in first)
    if exact < MOSTLY_RIGHT:
        which = "mostly because no answer of a group is right"
        fix = f"Lower rollout.temperature={temperature:g}, raise algo.group_size={group_size}, or use easier rows"
    else:
        which = "mostly because all answers of a group are right"
        fix = f"Use harder rows, or raise algo.group_size={group_size}"
    return (
        f"In {fmean(equal):.0%} of the groups of the first {len(first)} train steps all rewards were equal, {which} "
        f"({exact:.0%} of all are), and such a group trains nothing. {fix}."
    )


# -- Episodes, modalities, rewards and judges --------------------------------------------------------------------------
ENDED = "ended/"
AGENT = "agent/"
_MEANS = ("turns", "restarts", "cut_observations", "engine_s", "queue_s", "env_s", "tool_calls", "failed_calls")
_QUANTILES = ("turns/p50", "turns/p90", "turns/p99")


def episode_results(prompt_batches: Sequence[Values]) -> dict[str, Any]:
    """Returns the metrics of all episodes. Empty for a run with single-turn episodes.

    Means and shares are over all episodes, except the cached share, which is over all prompt tokens. ``given_up`` is
    the share of episodes that ended without a reward. A quantile is a mean over the quantiles of the prompt batches,
    weighted by their numbers of episodes. For a run with agents, ``agent`` has the mean metrics of the agents'
    requests.
    """
    played = [values for values in prompt_batches if "turns" in values]
    episodes = sum(values["samples"] for values in played)
    if not episodes:
        return {}

    def mean(name: str) -> float:
        return sum(values.get(name, 0.0) * values["samples"] for values in played) / episodes

    prompts = sum(values.get("prompt_tokens", 0.0) for values in played)
    cached = sum(values.get("cached_share", 0.0) * values.get("prompt_tokens", 0.0) for values in played)
    reasons = sorted({name for values in played for name in values if name.startswith(ENDED)})
    agents = sorted({name for values in played for name in values if name.startswith(AGENT)})
    return {
        **{name: mean(name) for name in _MEANS},
        **{name.replace("/", "_"): mean(name) for name in _QUANTILES},
        "cached_share": cached / max(1.0, prompts),
        "given_up": sum((mean(name) for name in reasons if name.removeprefix(ENDED) not in REWARDED_ENDS), 0.0),
        "ended": {name.removeprefix(ENDED): mean(name) for name in reasons},
        **({"agent": {name.removeprefix(AGENT): mean(name) for name in agents}} if agents else {}),
    }


MAX_POINTS = 0.02  # allowed difference between the issued share and the trained share of a modality
PREFIX = "modality/"


def modality_results(
    counts: Mapping[str, ModalityCounts], actor: Sequence[Values], prompt_batches: Sequence[Values]
) -> dict[str, Any]:
    """Returns the metrics of each modality. Empty for a run with text only.

    ``issued_share`` is the modality's share of all ended samples, and ``trained_share`` its share of all trained
    samples.
    """
    if set(counts) <= {TEXT}:
        return {}
    ended = sum(count.issued - count.open for count in counts.values())
    trained = sum(count.trained for count in counts.values())
    return {
        name: {
            "issued": modality.issued,
            "trained": modality.trained,
            "dropped": dict(modality.dropped),
            "open": modality.open,
            "issued_share": (modality.issued - modality.open) / ended if ended else None,
            "trained_share": modality.trained / trained if trained else None,
            "reward": _tagged_mean(actor, f"{PREFIX}{name}/reward", f"{PREFIX}{name}/samples"),
            "staleness": {str(staleness): count for staleness, count in sorted(modality.staleness.items())},
            "encode_ms": _tagged_mean(prompt_batches, f"{PREFIX}{name}/encode_ms", f"{PREFIX}{name}/encode_prompts"),
            "prefill_ms": _tagged_mean(prompt_batches, f"{PREFIX}{name}/prefill_ms", f"{PREFIX}{name}/prefill_prompts"),
        }
        for name, modality in counts.items()
    }


def unfair_shares(modalities: Mapping[str, Any]) -> Iterator[str]:
    """Yields a sentence for each modality if its issued share and its trained share differ too much."""
    for name, modality in modalities.items():
        issued, trained = modality["issued_share"], modality["trained_share"]
        if issued is None or trained is None or abs(trained - issued) <= MAX_POINTS:
            continue
        why = ", ".join(f"{count:,} {reason}" for reason, count in modality["dropped"].items()) or "none"
        yield (
            f"Modality {name} is {issued:.1%} of the issued samples and {trained:.1%} of the trained samples (dropped: "
            f"{why}). data.mix keeps its share."
        )


def _tagged_mean(records: Sequence[Values], name: str, weight: str) -> float | None:
    """Returns the mean of a metric over all records. A record's weight is its number of samples or prompts."""
    known = [(values[name], values[weight]) for values in records if name in values]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


REWARD, JUDGE = "reward/", "judge/"
JUDGE_CHECK = "judge_check"  # source of the record about verdicts on answers with known quality
_NONE = "none/"


def reward_results(prompt_batches: Sequence[Values]) -> dict[str, dict[str, object]]:
    """Returns reward name → metrics over all training answers.

    ``answers`` is the number of answers. ``mean`` is the mean of their rewards, or None if no answer has a reward.
    ``none`` is the share of answers without a reward, and ``none_by`` splits this share by cause. A quantile is a mean
    over the quantiles of the prompt batches, weighted by their numbers of answers.
    """
    return {
        name: {
            "answers": int(answers),
            "mean": _mean(batches, "mean", weight=_scored),
            "none": _mean(batches, "none", weight=_answers),
            "none_by": {
                cause.removeprefix(_NONE): _mean(batches, cause, weight=_answers)
                for cause in sorted({key for values in batches for key in values if key.startswith(_NONE)})
            },
            **{key: _mean(batches, key, weight=_answers) for key in ("ms_p50", "ms_p99")},
        }
        for name, batches in named_metrics(prompt_batches, REWARD).items()
        if (answers := sum(map(_answers, batches)))
    }


def judge_results(prompt_batches: Sequence[Values]) -> dict[str, dict[str, object]]:
    """Returns judge name → metrics over the run. Empty for a run without judges.

    ``verdicts`` is the number of requested verdicts. ``tokens`` is the number of tokens in prompts and texts of the
    judge. ``none`` is the share of requests without a verdict, and ``unreadable`` the share of generated texts without
    a readable verdict. ``queue_max`` is the largest number of waiting requests.
    """
    return {
        name: {
            "verdicts": int(sum(map(_verdicts, batches))),
            "none": _mean(batches, "none", weight=_verdicts),
            "unreadable": _mean(batches, "unreadable", weight=_texts),
            "tokens": int(sum(values.get("tokens", 0.0) for values in batches)),
            "queue_max": int(max(values.get("queue", 0.0) for values in batches)),
            **{key: _mean(batches, key, weight=_verdicts) for key in ("ms_p50", "ms_p99")},
        }
        for name, batches in named_metrics(prompt_batches, JUDGE).items()
    }


def named_metrics(prompt_batches: Sequence[Values], prefix: str) -> dict[str, list[dict[str, float]]]:
    """Collects the metrics with names PREFIX + NAME/KEY. Returns NAME → one mapping KEY → value per prompt batch."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for values in prompt_batches:
        of_batch: dict[str, dict[str, float]] = defaultdict(dict)
        for tag, value in values.items():
            if tag.startswith(prefix):
                name, _, key = tag.removeprefix(prefix).partition("/")
                of_batch[name][key] = value
        for name, metrics in of_batch.items():
            found[name].append(metrics)
    return dict(sorted(found.items()))


def panel_lines(newest: Values) -> Iterator[tuple[str, str]]:
    """Yields (label, text) of the panel's lines about rewards and judges in the newest prompt batch.

    Lines about rewards appear only if an answer has no reward, or if the run has several rewards or a judge.
    """
    rewards, judges = named_metrics([newest], REWARD), named_metrics([newest], JUDGE)
    if len(rewards) > 1 or judges or any(values["none"] for (values,) in rewards.values()):
        yield "rewards", " · ".join(_reward_text(name, values) for name, (values,) in rewards.items())
    if judges:
        yield "judges", " · ".join(_judge_text(name, values) for name, (values,) in judges.items())


def _reward_text(name: str, values: Values) -> str:
    causes = sorted(
        ((share, key.removeprefix(_NONE)) for key, share in values.items() if key.startswith(_NONE)), reverse=True
    )
    missing = "".join(f", {share:.0%} {cause}" for share, cause in causes)
    mean = f"{values['mean']:.3f}" if "mean" in values else "none"
    return f"{name} {mean}{missing}, p99 {values['ms_p99']:,.1f} ms"


def _judge_text(name: str, values: Values) -> str:
    message = f"{name} {values['verdicts']:.0f} verdicts, {values['queue']:.0f} wait"
    if "unreadable" in values:
        message += f", {values['unreadable']:.0%} unreadable, {values['tokens']:,.0f} tokens"
    return message


def _mean(batches: Sequence[Values], key: str, *, weight: Callable[[Values], float]) -> float | None:
    """Returns the mean of a metric, weighted by ``weight``, or None if all weights are 0."""
    known = [(values.get(key, 0.0), weight(values)) for values in batches if weight(values)]
    whole = sum(count for _, count in known)
    return sum(value * count for value, count in known) / whole if whole else None


def _answers(values: Values) -> float:
    return values.get("answers", 0.0)


def _scored(values: Values) -> float:
    return _answers(values) * (1.0 - values.get("none", 0.0))


def _verdicts(values: Values) -> float:
    return values.get("verdicts", 0.0)


def _texts(values: Values) -> float:
    return values.get("texts", 0.0)
