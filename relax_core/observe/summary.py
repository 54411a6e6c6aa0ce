"""Builds and writes summary.json, the figures of a run. docs/summary.md says what each field means."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from relax_core.contracts.bus import BusProgress
from relax_core.observe.event_log import ACTOR, EVAL, ROLLOUT, MetricRecord, by_step, without_undone
from relax_core.observe.findings import findings
from relax_core.observe.run_results import (
    JUDGE_CHECK,
    episode_results,
    judge_results,
    modality_results,
    reward_results,
    unfair_shares,
)

SUMMARY_FILE = "summary.json"
WARM_UP_STEPS = 5  # medians leave these steps out, because caches fill and pools grow in them
STEP_PARTS = ("wait", "bus", "decode", "train", "sync", "checkpoint")  # consecutive parts of the trainer's step
ENGINE_FIELDS = ("engines", "operations")  # of a run with a gateway
OWN_FIELDS = (
    *("outcome", "wall_s", "first_step_s", "recoveries", "stragglers", "records_dropped", "bad_rows", "keep_best"),
    *ENGINE_FIELDS,
)
MEAN_STEPS = 10  # "first" and "last" are means of this number of steps
QUANTILES = ("p10", "p50", "p90")

Values = Mapping[str, float]


def build_summary(records: Iterable[MetricRecord], *, progress: BusProgress, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures of a run as docs/summary.md describes them.

    A figure without data is None. ``records`` are all records, in order. ``meta`` has wall_s and first_step_s in
    seconds (None if no step was finished), outcome ("finished", "stopped" or "failed: <first cause>"), and what else of
    `OWN_FIELDS` there is. Its other fields go under "run", where the report reads the list of overrides.
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
        "response_tokens": _first_and_last(actor, "response_tokens")
        | _spread(actor, "response_tokens")
        | {quantile: _last(actor, f"response_tokens/{quantile}") for quantile in QUANTILES},
        "truncated": _first_and_last(actor, "truncated"),
        "groups_without_signal": _first_and_last(actor, "groups_without_signal"),
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
    """Writes ``run_dir/summary.json``, whole or not at all, and returns its path. NaN and infinities become null."""
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
    """Returns the versions of Python and of every installed library, by normalised name; Relax's own is "relax"."""
    found = {"python": platform.python_version()}
    for distribution in importlib.metadata.distributions():
        name = distribution.metadata["Name"].lower().replace("_", "-")
        found.setdefault(name, distribution.version)
    found["relax"] = found.pop("relax-core", "source tree, not installed")
    return dict(sorted(found.items()))


def _median(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _rate(values: Values, name: str) -> float | None:
    if name not in values or not values.get("step_ms"):
        return None
    return 1e3 * values[name] / values["step_ms"]


def _first_and_last(actor: Sequence[Values], name: str) -> dict[str, float | None]:
    known = [values[name] for values in actor if name in values]
    return {"first": fmean(known[:MEAN_STEPS]) if known else None, "last": _last(actor, name)}


def _last(actor: Sequence[Values], name: str) -> float | None:
    """Returns the mean over the last `MEAN_STEPS` steps that have the value."""
    known = [values[name] for values in actor if name in values]
    return fmean(known[-MEAN_STEPS:]) if known else None


def _spread(actor: Sequence[Values], name: str) -> dict[str, float | None]:
    """Returns the least and the largest value of all samples of all steps."""
    return {
        "min": min((values[f"{name}/min"] for values in actor if f"{name}/min" in values), default=None),
        "max": max((values[f"{name}/max"] for values in actor if f"{name}/max" in values), default=None),
    }


def _best(evaluations: Mapping[int, Values], metric: str | None) -> dict[str, Any] | None:
    """Returns the evaluation with the highest value of run.keep_best; of equal ones the first."""
    name = (metric or "").removeprefix(f"{EVAL}/")
    known = {step: values[name] for step, values in evaluations.items() if name in values}
    if not known:
        return None
    step = max(sorted(known), key=lambda one: known[one])
    return {"metric": metric, "step": step, "value": known[step]}


def _evaluation(step: int, values: Values) -> dict[str, Any]:
    """Returns the figures that every evaluation has, and under "figures" the others by name."""
    counts = {name: int(values.get(name, 0)) for name in ("rows", "bad_rows", "unscored")}
    own = {"step": step, "exact": values["exact"], "reward": values["reward"], **counts}
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
    """Returns means, so that the parts and "other" add up to the total. Rollout runs beside it and is no part of it."""
    timed = [values for values in settled if "step_ms" in values]
    rollout = [values["generate_ms"] for values in prompt_batches if "generate_ms" in values]
    split: dict[str, float | None] = dict.fromkeys(("total", *STEP_PARTS, "other"))
    if timed:
        total = fmean(values["step_ms"] for values in timed)
        # An older Relax did not record every part; a part without a record is under "other".
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
