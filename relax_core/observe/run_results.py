"""Sums up the figures of episodes, modalities, rewards and judges over a run, for its summary and its panel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from relax_core.config.modality import TEXT
from relax_core.contracts.bus import ModalityCounts
from relax_core.contracts.env import REWARDED_ENDS

Values = Mapping[str, float]
ENDED = "ended/"
AGENT = "agent/"
_MEANS = ("turns", "restarts", "cut_observations", "engine_s", "queue_s", "env_s", "tool_calls", "failed_calls")
_QUANTILES = ("turns/p50", "turns/p90", "turns/p99")


def episode_results(prompt_batches: Sequence[Values]) -> dict[str, Any]:
    """Returns the figures of all episodes; none for a run of one turn.

    Means and shares are over all episodes, but the cached share over all tokens of prompts. ``given_up`` is the share
    of episodes whose end has no reward. A quantile is the mean of those of the prompt batches, weighted by their
    episodes. ``agent`` has the means of the figures of agents' requests, if agents play.
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


MOST_POINTS = 0.02  # difference of a modality's shares of the issued and of the trained samples
PREFIX = "modality/"


def modality_results(
    counts: Mapping[str, ModalityCounts], actor: Sequence[Values], prompt_batches: Sequence[Values]
) -> dict[str, Any]:
    """Returns the figures of each modality; none for a run that issued text alone.

    ``issued_share`` is the share of all samples that have an end, and ``trained_share`` that of all trained ones.
    """
    if set(counts) <= {TEXT}:
        return {}
    ended = sum(one.issued - one.open for one in counts.values())
    trained = sum(one.trained for one in counts.values())
    return {
        name: {
            "issued": one.issued,
            "trained": one.trained,
            "dropped": dict(one.dropped),
            "open": one.open,
            "issued_share": (one.issued - one.open) / ended if ended else None,
            "trained_share": one.trained / trained if trained else None,
            "reward": _tagged_mean(actor, f"{PREFIX}{name}/reward", f"{PREFIX}{name}/samples"),
            "staleness": {str(staleness): count for staleness, count in sorted(one.staleness.items())},
            "encode_ms": _tagged_mean(prompt_batches, f"{PREFIX}{name}/encode_ms", f"{PREFIX}{name}/encode_prompts"),
            "prefill_ms": _tagged_mean(prompt_batches, f"{PREFIX}{name}/prefill_ms", f"{PREFIX}{name}/prefill_prompts"),
        }
        for name, one in counts.items()
    }


def unfair_shares(modalities: Mapping[str, Any]) -> Iterator[str]:
    """Returns a sentence for each modality whose share of the trained samples differs from that of the issued ones."""
    for name, one in modalities.items():
        issued, trained = one["issued_share"], one["trained_share"]
        if issued is None or trained is None or abs(trained - issued) <= MOST_POINTS:
            continue
        why = ", ".join(f"{count:,} {reason}" for reason, count in one["dropped"].items()) or "none"
        yield (
            f"Modality {name} is {issued:.1%} of the issued samples and {trained:.1%} of the trained ones (dropped: "
            f"{why}). data.mix keeps its share."
        )


def _tagged_mean(records: Sequence[Values], name: str, weight: str) -> float | None:
    """Returns the mean of a figure over all records, each weighted by the samples or prompts behind it."""
    known = [(values[name], values[weight]) for values in records if name in values]
    return sum(value * count for value, count in known) / sum(count for _, count in known) if known else None


REWARD, JUDGE = "reward/", "judge/"
JUDGE_CHECK = "judge_check"  # source of the record of the verdicts on known answers
_NONE = "none/"


def reward_results(prompt_batches: Sequence[Values]) -> dict[str, dict[str, object]]:
    """Returns the figures of each reward over all answers of training, by its name.

    ``answers`` counts them; ``mean`` is that of those with a reward, None if there are none; ``none`` is the share of
    the others, and ``none_by`` the shares by cause. A quantile is the mean of those of the prompt batches, weighted by
    their answers.
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
        for name, batches in named_figures(prompt_batches, REWARD).items()
        if (answers := sum(map(_answers, batches)))
    }


def judge_results(prompt_batches: Sequence[Values]) -> dict[str, dict[str, object]]:
    """Returns the figures of each judge over the run, by its name; none for a run that asks none.

    ``verdicts`` counts the questions and ``tokens`` the tokens of prompts and texts. ``none`` is the share of questions
    without a verdict, ``unreadable`` the share of texts without one, and ``queue_max`` the most questions that waited.
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
        for name, batches in named_figures(prompt_batches, JUDGE).items()
    }


def named_figures(prompt_batches: Sequence[Values], prefix: str) -> dict[str, list[dict[str, float]]]:
    """Returns, for each NAME, the figures KEY of each prompt batch that has values PREFIX + NAME/KEY."""
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for values in prompt_batches:
        of_batch: dict[str, dict[str, float]] = defaultdict(dict)
        for tag, value in values.items():
            if tag.startswith(prefix):
                name, _, key = tag.removeprefix(prefix).partition("/")
                of_batch[name][key] = value
        for name, figures in of_batch.items():
            found[name].append(figures)
    return dict(sorted(found.items()))


def panel_lines(newest: Values) -> Iterator[tuple[str, str]]:
    """Yields label and words about the newest prompt batch: of rewards if one is missing or there are several."""
    rewards, judges = named_figures([newest], REWARD), named_figures([newest], JUDGE)
    if len(rewards) > 1 or judges or any(values["none"] for (values,) in rewards.values()):
        yield "rewards", " · ".join(_reward_words(name, values) for name, (values,) in rewards.items())
    if judges:
        yield "judges", " · ".join(_judge_words(name, values) for name, (values,) in judges.items())


def _reward_words(name: str, values: Values) -> str:
    causes = sorted(
        ((share, key.removeprefix(_NONE)) for key, share in values.items() if key.startswith(_NONE)), reverse=True
    )
    missing = "".join(f", {share:.0%} {cause}" for share, cause in causes)
    mean = f"{values['mean']:.3f}" if "mean" in values else "none"
    return f"{name} {mean}{missing}, p99 {values['ms_p99']:,.1f} ms"


def _judge_words(name: str, values: Values) -> str:
    words = f"{name} {values['verdicts']:.0f} verdicts, {values['queue']:.0f} wait"
    if "unreadable" in values:
        words += f", {values['unreadable']:.0%} unreadable, {values['tokens']:,.0f} tokens"
    return words


def _mean(batches: Sequence[Values], key: str, *, weight: Callable[[Values], float]) -> float | None:
    """Returns the mean of a figure, weighted by ``weight``; None if all weights are 0."""
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
