"""Sums up what the rewards and the judges of a run did, and words it for the panel."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence

Values = Mapping[str, float]
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
