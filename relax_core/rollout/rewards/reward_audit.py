"""Audits a reward before training: finds awarded wrong answers, and right answers that are not awarded."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from relax_core.config.reward_choice import ChosenReward, RewardChoice
from relax_core.contracts.data import BadRow, DataRow, PromptSource, question
from relax_core.contracts.judge import JudgedInput, JudgeSetup
from relax_core.contracts.reward import REPORT, RewardConfig, RewardInput, RewardOutput
from relax_core.registry import find_reward
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.judges.judge_pool import JudgePool, RunJudge
from relax_core.rollout.judges.judge_servers import JudgeUrl
from relax_core.rollout.rewards.label_check import right_answers, short
from relax_core.rollout.rewards.reward_pool import REWARD_CALLS, RewardPool
from relax_core.rollout.rewards.wrong_answers import RIGHT_FORMS, THINKING, AuditedRow, right_forms, wrong_answers

Score = Callable[[Sequence[RewardInput]], Awaitable[list[RewardOutput]]]
AUDITED_ROWS = 64
_CONCURRENT_ROWS = 4
OWN_FORM = "the reward's own form"  # the form of answers that the SPEC's right_answers makes
# An answer is awarded if its gain over an empty answer is above this share of the best right answer's gain. The share
# is a little above a fifth, because some rewards (deepeyes) give a fifth for the form alone.
SCORES_FROM = 0.2 + 1e-6
_TAKEN = 0.5  # the reward accepts a form of right answers if it awards the form in a larger share of rows
_READS_LABEL = 0.1  # share of rows; a reward that distinguishes labels in fewer rows does not read the label


@dataclass(kw_only=True)
class FamilyCounts:
    """Counts a family's wrong answers: ``scored`` of ``answers`` were awarded, in ``rows_scored`` of ``rows`` rows.

    ``worst`` describes the awarded answer with the largest gain ``worst_gain``; without an awarded answer it is empty.
    """

    answers: int = 0
    scored: int = 0
    rows: int = 0
    rows_scored: int = 0
    worst: str = ""
    worst_gain: float = 0.0

    @property
    def share(self) -> float:
        """Returns the share of rows with an awarded answer of the family."""
        return self.rows_scored / self.rows if self.rows else 0.0


@dataclass(frozen=True, kw_only=True)
class RewardAudit:
    """Holds the result of an audit.

    ``families`` has the counts of the families of wrong answers, by name. The reward accepts a form if it awards most
    right answers in this form. ``right`` is the number of right answers in accepted forms, and ``missed`` lists right
    answers in accepted forms that were not awarded. ``not_taken`` lists the forms that are not accepted. ``rows`` is
    the number of scored rows. ``judged`` is the number of rows with a right answer that had a larger reward than an
    empty answer; only these rows are in ``families``, ``right`` and ``missed``. ``without`` is the number of answers
    without a reward. ``compared`` is the number of rows that were also scored with the label of another row.
    ``distinguished`` is the number of these rows in which the row's label had a larger reward than the other label, in
    at least one form. ``constant`` is True if all answers had the same reward.
    """

    families: Mapping[str, FamilyCounts]
    missed: Sequence[str]
    right: int
    not_taken: Sequence[str]
    rows: int
    judged: int
    without: int
    compared: int
    distinguished: int
    constant: bool
    seconds: float

    @property
    def reads_label(self) -> bool:
        """Returns False if the reward treats a row's label like other rows' labels; True without such evidence."""
        return self.constant or not self.compared or self.distinguished > _READS_LABEL * self.compared

    @property
    def wrong_share(self) -> float:
        """Returns the share of wrong answers that were awarded."""
        answers = sum(family.answers for family in self.families.values())
        return sum(family.scored for family in self.families.values()) / answers if answers else 0.0

    @property
    def missed_share(self) -> float:
        """Returns the share of right answers in accepted forms that were not awarded."""
        return len(self.missed) / self.right if self.right else 0.0

    def above(self, limit: float) -> list[str]:
        """Returns the families with an awarded answer in more than the share ``limit`` of rows, worst family first."""
        found = [name for name, family in self.families.items() if family.share > limit]
        return sorted(found, key=lambda name: -self.families[name].share)


def audited_rows(source: PromptSource, *, most: int) -> Iterator[DataRow]:
    """Yields at most ``most`` data rows with a prompt and a label, spread evenly over the data."""
    found = 0
    for number in range(0, len(source), max(1, len(source) // most)):
        try:
            row = source.numbered(number)
        except BadRow:
            continue
        if str(row["answer"]).strip() and row["prompt"]:
            yield row
            found += 1
        if found == most:
            return


def audit_run_reward(
    reward: RewardConfig, rows: Sequence[DataRow], *, workers: int, limit_s: float | None = None
) -> RewardAudit:
    """Returns the audit of a run's reward. An isolated reward has ``workers`` processes.

    Judges must have a url. Raises ValueError if the reward cannot be audited without a run, fails to score a plain
    right answer, does not read the label, or awards no form of any label.
    """
    spec = find_reward(reward.name)
    if spec.scores_turns:
        raise ValueError(f"reward={spec.name} scores the turns of an environment; no answer can be made for it.")
    alone = replace(reward, max_failed=1.0, shadow=None, on_hack=REPORT)  # failures do not end the audit
    choice = RewardChoice(spec, alone)
    setups = _judges_with_url(choice.judged)

    def right_of(row: DataRow) -> list[str]:
        scorers = [scorer for scorer in choice.scorers(row) if scorer.spec.right_answers is not None]
        return [text for scorer in scorers for text in right_answers(scorer, str(row["answer"]))]

    async def scored() -> RewardAudit:
        judges = JudgePool(
            {name: RunJudge(name, setup, JudgeUrl(setup.settings), seed=0) for name, setup in setups.items()}
        )

        async def score(inputs: Sequence[RewardInput]) -> list[RewardOutput]:
            if not setups:
                return await pool.score(inputs)
            async with judges.of_group() as asking:
                return await pool.score([JudgedInput.of(given, asking) for given in inputs])

        with RewardPool(spec, alone, workers=workers, concurrency=REWARD_CALLS) as pool:
            try:
                await _try_first(score, rows[0], name=spec.name)
                return await audit_reward(score, rows, right_of, limit_s=limit_s)
            finally:
                await judges.close()

    audit = asyncio.run(scored())
    if not audit.reads_label:
        raise ValueError(
            f"reward={spec.name} cannot be checked: it awards answers without the label. In {audit.compared} rows the "
            "label of another row has the same reward as the label, in every form. Check the other rewards that "
            "read the label; if this reward reads it, give its SPEC right_answers."
        )
    if not audit.judged:
        raise ValueError(
            f"reward={spec.name} cannot be checked: of {audit.rows} rows it awards no form of the label. "
            "Give its SPEC right_answers, or look at the labels."
        )
    return audit


def _judges_with_url(judged: ChosenReward | None) -> Mapping[str, JudgeSetup]:
    """Returns the judges of a reward; empty if the reward has no judge. Raises ValueError for a judge without a url."""
    if judged is None:
        return {}
    assert judged.spec.judges is not None
    setups = judged.spec.judges(judged.config).judges
    if own := [name for name, setup in setups.items() if setup.settings.url is None]:
        raise ValueError(
            f"reward={judged.spec.name} asks judge {own[0]}: its engines start with the run. Serve its model and "
            f"name the server: reward.judges.{own[0]}.url=http://HOST:PORT/v1."
        )
    return setups


async def _try_first(score: Score, row: DataRow, *, name: str) -> None:
    """Raises ValueError if a plain right answer has no reward, for example because a server is down."""
    (output,) = await _scored(score, row, [_Answer(text=str(row["answer"]), form=OWN_FORM)])
    if output.reward is None and output.cause not in ("label", ""):
        raise ValueError(f"reward={name} cannot be checked: an answer has no reward: {output.reason}")


async def audit_reward(
    score: Score,
    rows: Sequence[DataRow],
    right_of: Callable[[DataRow], Sequence[str]],
    *,
    limit_s: float | None = None,
) -> RewardAudit:
    """Audits a reward: for each row, scores wrong answers, and the label in the usual forms.

    ``right_of`` returns further right answers to a row, made by the reward's ``right_answers``. After ``limit_s``
    seconds the audit begins no further row. ``score`` returns the outputs of the answers to one row; its errors are
    raised.
    """
    began = time.perf_counter()
    labels = list(dict.fromkeys(str(row["answer"]) for row in rows))
    made: list[list[_Answer]] = []
    scored: list[list[RewardOutput]] = []
    for first in range(0, len(rows), _CONCURRENT_ROWS):
        if limit_s is not None and made and time.perf_counter() - began > limit_s:
            rows = rows[:first]
            break
        some = rows[first : first + _CONCURRENT_ROWS]
        answers_of = [_answers(row, labels, right_of) for row in some]
        made += answers_of
        scored += await asyncio.gather(
            *(_scored(score, row, answers) for row, answers in zip(some, answers_of, strict=True))
        )
    families: dict[str, FamilyCounts] = defaultdict(FamilyCounts)
    taken: dict[str, list[tuple[bool, str]]] = defaultdict(list)
    judged = without = compared = distinguished = 0
    for row, answers, outputs in zip(rows, made, scored, strict=True):
        without += sum(output.reward is None for output in outputs)
        if any(answer.other for answer in answers):
            compared += 1
            distinguished += _distinguishes(answers, outputs)
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
        not_taken=[form for form in taken if form not in forms],
        rows=len(rows),
        judged=judged,
        without=without,
        compared=compared,
        distinguished=distinguished,
        constant=len({output.reward for outputs in scored for output in outputs}) < 2,
        seconds=time.perf_counter() - began,
    )


@dataclass(frozen=True, kw_only=True)
class _Answer:
    """Holds an audit answer: a wrong answer of ``family``, the label in ``form``, or another label in ``other``."""

    text: str
    family: str = ""
    form: str = ""
    other: str = ""


def _answers(row: DataRow, labels: Sequence[str], right_of: Callable[[DataRow], Sequence[str]]) -> list[_Answer]:
    label = str(row["answer"])
    seen = AuditedRow(
        prompt=question(row["prompt"]),
        label=label,
        others=[other_label for other_label in labels if other_label != label],
    )
    wrong = [_Answer(text=text, family=family) for family, text in wrong_answers(seen)]
    right = [_Answer(text=text, form=form) for form, text in zip(RIGHT_FORMS, right_forms(label), strict=True)]
    own = [_Answer(text=text, form=OWN_FORM) for text in right_of(row)]
    if any(answer.text.startswith(THINKING) for answer in own):
        wrong += [_Answer(text=THINKING + answer.text, family=answer.family) for answer in wrong]
    return [*right, *own, *_with_another_label(row, seen.others, right_of), *wrong]


def _with_another_label(
    row: DataRow, others: Sequence[str], right_of: Callable[[DataRow], Sequence[str]]
) -> list[_Answer]:
    """Returns the label of another row in every form; empty if all rows have the same label."""
    if not others:
        return []
    try:
        own = right_of({**row, "answer": others[0]})
    except ValueError:
        own = ()
    texts = zip(RIGHT_FORMS, right_forms(others[0]), strict=True)
    return [
        *(_Answer(text=text, other=form) for form, text in texts),
        *(_Answer(text=text, other=OWN_FORM) for text in own),
    ]


def _distinguishes(answers: Sequence[_Answer], outputs: Sequence[RewardOutput]) -> bool:
    """Returns whether, in at least one form, the row's label has a larger reward than the other label."""
    best: dict[str, float] = defaultdict(lambda: -math.inf)
    for answer, output in zip(answers, outputs, strict=True):
        if answer.other and output.reward is not None:
            best[answer.other] = max(best[answer.other], output.reward)
    return any(
        answer.form in best and output.reward is not None and output.reward > best[answer.form]
        for answer, output in zip(answers, outputs, strict=True)
    )


async def _scored(score: Score, row: DataRow, answers: Sequence[_Answer]) -> list[RewardOutput]:
    label, given = str(row["answer"]), without_bytes(row)
    inputs = [RewardInput(response=answer.text, stopped=True, answer=label, row=given) for answer in answers]
    return await score(inputs)


def _gains(answers: Sequence[_Answer], outputs: Sequence[RewardOutput]) -> list[float] | None:
    """Returns the answers' gains over an empty answer, 1 for the best right answer; None if no right answer gains."""
    values = [output.reward for output in outputs]
    empty = next(
        (value for answer, value in zip(answers, values, strict=True) if answer.family and answer.text == ""), None
    )
    known = [value for value in values if value is not None]
    base = empty if empty is not None else min(known, default=0.0)
    right = [value for answer, value in zip(answers, values, strict=True) if answer.form and value is not None]
    best = max(right, default=base)
    if best <= base:
        return None
    return [0.0 if value is None else (value - base) / (best - base) for value in values]


def _count(
    families: dict[str, FamilyCounts],
    taken: dict[str, list[tuple[bool, str]]],
    label: str,
    answers: Sequence[_Answer],
    gains: Sequence[float],
) -> None:
    awarded: dict[str, bool] = {}
    for answer, gain in zip(answers, gains, strict=True):
        got = gain > SCORES_FROM
        if answer.form:
            taken[answer.form].append((got, f"{short(answer.text)} for the label {short(label)}"))
            continue
        if answer.other:
            continue
        figures = families[answer.family]
        figures.answers += 1
        figures.scored += got
        awarded[answer.family] = awarded.get(answer.family, False) or got
        if got and gain > figures.worst_gain:
            figures.worst, figures.worst_gain = f"{short(answer.text)} for the label {short(label)}", gain
    for family, got in awarded.items():
        families[family].rows += 1
        families[family].rows_scored += got
