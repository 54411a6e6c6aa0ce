"""Audits a reward before it trains a model: which wrong answers it awards, and which right answers it does not."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.data import DataRow
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.rewards.label_check import short
from relax_core.rollout.rewards.reward_pool import RewardPool
from relax_core.rollout.rewards.wrong_answers import RIGHT_FORMS, AuditedRow, right_forms, wrong_answers

AUDITED_ROWS = 64
SCORES_FROM = 0.2  # of what a right answer gains over an empty one; with less an answer does not count as awarded
_TAKEN = 0.5  # a form of right answers that is awarded in more rows than this is one that the reward takes


@dataclass(kw_only=True)
class FamilyFigures:
    """Counts the answers of a family: ``scored`` of ``answers`` were awarded, in ``rows_scored`` of ``rows`` rows.

    ``worst`` is the answer with the largest reward, as a line of text; it is empty if none was awarded.
    """

    answers: int = 0
    scored: int = 0
    rows: int = 0
    rows_scored: int = 0
    worst: str = ""
    worst_gain: float = 0.0

    @property
    def share(self) -> float:
        """Returns the share of rows in which an answer of the family was awarded."""
        return self.rows_scored / self.rows if self.rows else 0.0


@dataclass(frozen=True, kw_only=True)
class RewardAudit:
    """Is the result of an audit.

    ``families`` are those of wrong answers by their names. ``missed`` lists right answers that were not awarded in a
    form that the reward takes in most rows; ``right`` is the number of right answers in such forms. ``judged`` of
    ``rows`` rows had a right answer that was awarded; the others say nothing. ``without`` counts answers without a
    reward.
    """

    families: Mapping[str, FamilyFigures]
    missed: Sequence[str]
    right: int
    rows: int
    judged: int
    without: int
    seconds: float

    @property
    def wrong_share(self) -> float:
        """Returns the share of wrong answers that were awarded."""
        answers = sum(one.answers for one in self.families.values())
        return sum(one.scored for one in self.families.values()) / answers if answers else 0.0

    @property
    def missed_share(self) -> float:
        """Returns the share of right answers, in forms that the reward takes, that were not awarded."""
        return len(self.missed) / self.right if self.right else 0.0

    def above(self, limit: float) -> list[str]:
        """Returns the families of which an answer was awarded in more than this share of the rows, worst first."""
        found = [name for name, one in self.families.items() if one.share > limit]
        return sorted(found, key=lambda name: -self.families[name].share)


async def audit_reward(
    pool: RewardPool, rows: Sequence[DataRow], right_of: Callable[[DataRow], Sequence[str]]
) -> RewardAudit:
    """Scores answers to each of ``rows`` that are wrong by their making, and the label in the usual forms.

    ``right_of`` returns further right answers to a row, in its reward's own form. Raises as `RewardPool.score` does.
    """
    began = time.perf_counter()
    labels = list(dict.fromkeys(str(row["answer"]) for row in rows))
    made = [_answers(row, labels, right_of) for row in rows]
    scored = await asyncio.gather(*(_scored(pool, row, answers) for row, answers in zip(rows, made, strict=True)))
    families: dict[str, FamilyFigures] = defaultdict(FamilyFigures)
    taken: dict[str, list[tuple[bool, str]]] = defaultdict(list)
    judged = without = 0
    for row, answers, outputs in zip(rows, made, scored, strict=True):
        without += sum(output.reward is None for output in outputs)
        gains = _gains(answers, outputs)
        if gains is None:
            continue
        judged += 1
        _count(families, taken, str(row["answer"]), answers, gains)
    forms = [form for form, found in taken.items() if sum(got for got, _ in found) > _TAKEN * len(found)]
    return RewardAudit(
        families=dict(families),
        missed=[f"{form}: {text}" for form in forms for got, text in taken[form] if not got],
        right=sum(len(taken[form]) for form in forms),
        rows=len(rows),
        judged=judged,
        without=without,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Is one made answer: a wrong one of a family, or a right one in a form."""

    text: str
    family: str = ""
    form: str = ""


def _answers(row: DataRow, labels: Sequence[str], right_of: Callable[[DataRow], Sequence[str]]) -> list[_Answer]:
    label = str(row["answer"])
    seen = AuditedRow(prompt=_text_of(row["prompt"]), label=label, others=[one for one in labels if one != label])
    wrong = [_Answer(text=text, family=family) for family, text in wrong_answers(seen)]
    right = [_Answer(text=text, form=form) for form, text in zip(RIGHT_FORMS, right_forms(label), strict=True)]
    own = [_Answer(text=text, form="the reward's own form") for text in right_of(row)]
    return [*right, *own, *wrong]


async def _scored(pool: RewardPool, row: DataRow, answers: Sequence[_Answer]) -> list[RewardOutput]:
    label, given = str(row["answer"]), without_bytes(row)
    inputs = [RewardInput(response=one.text, stopped=True, answer=label, row=given) for one in answers]
    return await pool.score(inputs)


def _gains(answers: Sequence[_Answer], outputs: Sequence[RewardOutput]) -> list[float] | None:
    """Returns each answer's gain over an empty answer, 1 for the best right one; None if no right one gains."""
    values = [output.reward for output in outputs]
    empty = next((value for one, value in zip(answers, values, strict=True) if one.family and one.text == ""), None)
    known = [value for value in values if value is not None]
    base = empty if empty is not None else min(known, default=0.0)
    right = [value for one, value in zip(answers, values, strict=True) if one.form and value is not None]
    best = max(right, default=base)
    if best <= base:
        return None
    return [0.0 if value is None else (value - base) / (best - base) for value in values]


def _count(
    families: dict[str, FamilyFigures],
    taken: dict[str, list[tuple[bool, str]]],
    label: str,
    answers: Sequence[_Answer],
    gains: Sequence[float],
) -> None:
    awarded: dict[str, bool] = {}
    for one, gain in zip(answers, gains, strict=True):
        got = gain >= SCORES_FROM
        if one.form:
            taken[one.form].append((got, f"{short(one.text)} for the label {short(label)}"))
            continue
        figures = families[one.family]
        figures.answers += 1
        figures.scored += got
        awarded[one.family] = awarded.get(one.family, False) or got
        if got and gain > figures.worst_gain:
            figures.worst, figures.worst_gain = f"{short(one.text)} for the label {short(label)}", gain
    for family, got in awarded.items():
        families[family].rows += 1
        families[family].rows_scored += got


def _text_of(prompt: Any) -> str:
    """Returns the text of a prompt, of messages that of the last user."""
    if isinstance(prompt, str):
        return prompt
    for message in reversed(prompt):
        content = message.get("content")
        if message.get("role") == "user" and content:
            parts = [content] if isinstance(content, str) else [part.get("text", "") for part in content]
            return "\n".join(part for part in parts if isinstance(part, str))
    return ""
