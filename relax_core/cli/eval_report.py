"""Writes an evaluation's result as a file for programs, and prints it as a table for people."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from relax_core.data.eval_sets import NAMED_ROWS
from relax_core.rollout.evaluation.eval_metrics import Estimate, mean_reward
from relax_core.rollout.evaluation.evaluator import SetAnswers
from relax_core.rollout.prompt_tokens import shown_prompt

RESULT_FILE = "evaluation.json"
ANSWERS_FILE = "answers.jsonl"
HELD_OUT = "held-out rows"  # the name of a set without one
INTERVALS = (
    "95 %. Shares: Wilson (1927), with the effective number of cases from the spread between prompts (Kish 1965; Korn "
    "and Graubard 1998), at least one a prompt. Reward: normal, over the prompts' means. pass@k: Chen et al. (2021), "
    "equation 1. maj@k: mean over all draws of k answers; ties are broken at random."
)


def as_result(found: Sequence[SetAnswers], *, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the contents of evaluation.json."""
    return {**meta, "intervals": INTERVALS, "sets": [_set(one) for one in found]}


def write_result(folder: Path, result: Mapping[str, Any], found: Sequence[SetAnswers]) -> Path:
    """Writes the result and all answers into ``folder``; returns the result's path."""
    with (folder / ANSWERS_FILE).open("w", encoding="utf-8") as file:
        for one in found:
            for prompt, answers in zip(one.of.rows, one.answers, strict=True):
                line = {
                    "set": one.of.name,
                    "prompt": shown_prompt(prompt.row["prompt"], [media.item for media in prompt.media])
                    if prompt.media
                    else prompt.row["prompt"],
                    "answer": str(prompt.row["answer"]),
                    "responses": [answer.text for answer in answers],
                    "exact": [answer.exact for answer in answers],
                    "rewards": [answer.reward for answer in answers],
                    "votes": [answer.vote for answer in answers],
                    "why": [answer.why for answer in answers],
                    "turns": [answer.turns if answer.ended else 0 for answer in answers],
                }
                file.write(json.dumps(line, ensure_ascii=False) + "\n")
    path = folder / RESULT_FILE
    path.write_text(json.dumps(result, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return path


def print_result(console: Console, result: Mapping[str, Any]) -> None:
    """Prints a table of all figures with their intervals, and below it further facts about each set."""
    table = Table(show_edge=False)
    for heading in ("set", "figure", "value", "from", "to"):
        table.add_column(heading, justify="left" if heading in ("set", "figure") else "right")
    for one in result["sets"]:
        first = f"{one['name'] or HELD_OUT}, {one['rows']} prompts"
        for name, figure in one["figures"].items():
            table.add_row(first, name, *(f"{figure[key]:.4f}" for key in ("value", "low", "high")))
            first = ""
    console.print(table)
    for one in result["sets"]:
        for words in _remarks(one):
            console.print(f"{one['name'] or HELD_OUT}: {words}", soft_wrap=True)


def _remarks(one: Mapping[str, Any]) -> list[str]:
    """Returns facts about a set that its figures do not show."""
    words = [f"{one['truncated']:.1%} of {one['answers']} answers reached the token limit"]
    if one["bad_rows"]:
        reasons = ", ".join(f"{count} {reason}" for reason, count in one["bad_rows"].items())
        words.append(f"{sum(one['bad_rows'].values())} data rows cannot be used and are left out ({reasons})")
    if one["unscored"]:
        words.append(f"{one['unscored']} answers have no reward and count as not exact")
    return words


def _set(one: SetAnswers) -> dict[str, Any]:
    answers = [answer for of_prompt in one.answers for answer in of_prompt]
    figures = _figures(one)
    for part, its in one.by_part().items():
        figures |= {f"{part}/{name}": figure for name, figure in _figures(its).items()}
    return {
        "name": one.of.name,
        "rows": len(one.answers),
        "answers": len(answers),
        "figures": figures,
        "truncated": fmean(answer.cut for answer in answers) if answers else 0.0,
        "response_tokens": fmean(answer.tokens for answer in answers) if answers else 0.0,
        "unscored": one.unscored,
        "bad_rows": dict(Counter(error.reason for error in one.of.bad)),
        "bad_rows_named": [str(error) for error in one.of.bad[:NAMED_ROWS]],
    }


def _figures(one: SetAnswers) -> dict[str, dict[str, float]]:
    figures = {name: _as_dict(estimate) for name, estimate in one.estimates().items()}
    reward = mean_reward(one.answers)
    return figures if reward is None else figures | {"reward": _as_dict(reward)}


def _as_dict(estimate: Estimate) -> dict[str, float]:
    return {"value": estimate.value, "low": estimate.low, "high": estimate.high}
