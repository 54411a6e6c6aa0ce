"""Makes a timeline of a run from its records: what the trainer, the rollout and the weight pushes did, and when.

Every record tells how long its work took and when it ended. The parts of a train step are laid one behind the other in
the order in which the trainer does them; a step of several micro-batches does some of them in turns, so their lengths
are exact and their places inside the step are not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec

from relax_core.observe.event_log import ACTOR, EVAL, RANK, ROLLOUT
from relax_core.observe.summary import STEP_PARTS
from relax_core.server.run_series import TimedRecord
from relax_core.server.timeline.timeline_spans import TRAIN, Span, engine_spans, rank_spans, span_of

ORDER = ("checkpoint", *(part for part in STEP_PARTS if part != "checkpoint"))
OTHER = "other"
TRAINER_LANE, PARTS_LANE = "trainer", "trainer's parts"
MOST_STEPS = 400
MOST_RANK_SPANS = 20_000  # of a timeline; the ranks' parts are left out where there would be more
NEAR_S = 60.0  # a record is made so long after its step's end at most, and a push ends so long after its begin
MUCH, LITTLE = 0.5, 0.1  # shares of the trainer's time from and up to which it waits for the other side, or does not


class Timeline(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the spans of the train steps ``first`` to ``last``, and where the trainer's time went.

    ``shares`` maps each part of a step to its share of the time, and ``told`` says in words who waits for whom.
    """

    first: int
    last: int
    start_s: float
    end_s: float
    spans: list[Span]
    shares: dict[str, float]
    told: list[str]


def make_timeline(
    timed: Sequence[TimedRecord],
    *,
    first: int | None,
    last: int | None,
    newest: int = 8,
    events: Sequence[Span] = (),
) -> Timeline | None:
    """Returns the timeline of these train steps, at most `MOST_STEPS`, or of the ``newest`` ones; None without steps.

    Of steps that were done twice, because a resume undid them, the later ones count; the spans are all those of any
    attempt that lie in their time, and those of ``events`` (`event_spans.py`).
    """
    steps: dict[int, TimedRecord] = {one.step: one for one in timed if one.source == ACTOR and "step" in one.ms}
    if not steps:
        return None
    last = max(steps) if last is None else last
    first = max(0, last - newest + 1) if first is None else first
    first = max(first, last - MOST_STEPS + 1)
    chosen = [steps[step] for step in sorted(steps) if first <= step <= last]
    if not chosen:
        return None
    start_s = min(one.end_s - one.ms["step"] / 1e3 for one in chosen)
    end_s = max(one.end_s for one in chosen)
    near = [one for one in timed if start_s - NEAR_S < one.end_s and (one.source != RANK or one.end_s < end_s + NEAR_S)]
    spans = [span for span in all_spans(near) if span.end_s > start_s and span.start_s < end_s]
    spans += [span for span in events if span.end_s > start_s and span.start_s < end_s]
    if sum(span.of_rank for span in spans) > MOST_RANK_SPANS:
        spans = [span for span in spans if not span.of_rank]
    shares = step_shares(chosen)
    return Timeline(
        first=chosen[0].step,
        last=chosen[-1].step,
        start_s=start_s,
        end_s=end_s,
        spans=spans,
        shares=shares,
        told=_told(chosen, shares),
    )


def all_spans(timed: Sequence[TimedRecord]) -> list[Span]:
    """Returns every span of the records, in the order of their records."""
    spans: list[Span] = []
    actors = [one for one in timed if one.source == ACTOR and "step" in one.ms]
    for one in timed:
        if one.source == ACTOR and "step" in one.ms:
            spans += _step_spans(one)
        elif one.source == ROLLOUT and "generate" in one.ms:
            worker = int(one.ms.get("worker", 0))
            spans.append(span_of(f"rollout {worker}", f"batch for weights {one.step}", one, one.ms["generate"]))
            spans += engine_spans(one)
        elif one.source == RANK:
            spans += rank_spans(one)
        elif one.source == EVAL:
            spans.append(span_of("evaluation", f"evaluation of weights {one.step} is there", one, 0.0))
    for before, after in pairwise(actors):
        if push := after.ms.get("push"):
            spans.append(
                Span(
                    lane="weights",
                    name=f"weights {before.step + 1} to the engines",
                    start_s=before.end_s,
                    end_s=before.end_s + push / 1e3,
                    step=before.step,
                )
            )
    return spans


def step_shares(steps: Sequence[TimedRecord]) -> dict[str, float]:
    """Returns the share of each part in the time of these steps; together they are 1."""
    total = sum(one.ms["step"] for one in steps)
    shares = {part: sum(one.ms.get(part, 0.0) for one in steps) / total for part in ORDER} if total else {}
    return {**shares, OTHER: 1.0 - sum(shares.values())} if shares else {}


class _Part(NamedTuple):
    name: str
    ms: float


def _step_spans(one: TimedRecord) -> list[Span]:
    parts = [_Part(name, one.ms.get(name, 0.0)) for name in ORDER]
    rest = one.ms["step"] - sum(part.ms for part in parts)
    at_s = one.end_s - one.ms["step"] / 1e3
    spans = [span_of(TRAINER_LANE, f"step {one.step}", one, one.ms["step"])]
    for part in [*parts, _Part(OTHER, rest)]:
        if part.ms > 0:
            inner = {name: value for name, value in one.ms.items() if name.startswith(TRAIN)}
            values = inner if part.name == "train" else {}
            end_s = min(at_s + part.ms / 1e3, one.end_s)
            spans.append(Span(lane=PARTS_LANE, name=part.name, start_s=at_s, end_s=end_s, step=one.step, values=values))
            at_s = end_s
    return spans


def _told(steps: Sequence[TimedRecord], shares: dict[str, float]) -> list[str]:
    if not shares:
        return []
    told = []
    wait = shares["wait"]
    if wait >= MUCH:
        told.append(
            f"The trainer waits for samples {wait:.0%} of its time: generation, env or rewards are the slower side."
        )
    elif wait <= LITTLE:
        told.append(f"The trainer waits for samples {wait:.0%} of its time: it is the slower side.")
    else:
        told.append(f"The trainer waits for samples {wait:.0%} of its time and trains {shares['train']:.0%} of it.")
    inner: Counter[str] = Counter()
    for one in steps:
        inner.update({name: value for name, value in one.ms.items() if name.startswith(TRAIN)})
    if inner and wait < MUCH:
        ((name, most),) = inner.most_common(1)
        share = most / sum(one.ms["step"] for one in steps)
        told.append(f"Its longest part inside the train call is {name.removeprefix(TRAIN)}, {share:.0%} of the time.")
    for part, words in (
        ("sync", "publishes weights"),
        ("checkpoint", "saves checkpoints"),
        ("bus", "waits for the bus"),
    ):
        if shares[part] > LITTLE:
            told.append(f"It {words} {shares[part]:.0%} of its time.")
    return told
