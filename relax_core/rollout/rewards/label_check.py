"""Finds labels that a reward does not award. It builds right answers from the labels and scores them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from relax_core.config.reward_choice import ChosenReward, RewardChoice
from relax_core.contracts.child_process import LimitedLog
from relax_core.contracts.reward import RewardInput, RewardOutput
from relax_core.contracts.untrusted_values import shown
from relax_core.registry import plugin_error_text
from relax_core.rollout.episodes.episode_records import without_bytes
from relax_core.rollout.rewards.reward_calls import score_sync
from relax_core.rollout.rewards.reward_sandbox import reward_sandbox
from relax_core.rollout.rewards.reward_worker import RewardWorker

MAX_SHAPES = 256  # label shapes that are checked per reward, the most frequent first
NAMED_LABELS = 3
_MAX_KEPT = 20_000  # label shapes that are kept in memory
_MAX_UNIT = 40  # longest label, in characters, that may be a number with its unit
_MAX_LATE = 3  # the check ends after so many labels with a time-out
_RUN = re.compile(r"\\[A-Za-z]+|[A-Za-z]{2,}(?:\s+[A-Za-z]{2,})*|[A-Za-z]|\d+")


def label_shape(label: str) -> str:
    """Returns a label with each number replaced by 0, each single letter by a, and each word by aa.

    LaTeX commands are kept. In a short label with a number, words are kept, too, because they may be units.
    """
    label = label.strip()
    units = len(label) <= _MAX_UNIT and not label.isalpha() and any(map(str.isdigit, label))

    def kind(run: re.Match[str]) -> str:
        text = run[0]
        if text[0] == "\\" or (units and len(text) > 1 and text[0].isalpha()):
            return text
        return "0" if text[0].isdigit() else "a" if len(text) == 1 else "aa"

    return _RUN.sub(kind, label)


@dataclass(frozen=True, kw_only=True)
class _Seen:
    """Holds the first data row of a label shape."""

    chosen: ChosenReward
    row: Mapping[str, Any]
    where: str


class LabelCheck:
    """Collects data rows by the shapes of their labels, and scores one label of each shape.

    Only rewards with ``right_answers`` that are not async are checked. Isolated rewards are not checked for integer
    labels, so most data needs no worker process.
    """

    def __init__(self, choice: RewardChoice) -> None:
        self._choice = choice
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def add(self, row: Mapping[str, Any], where: str) -> None:
        """Adds a usable data row with its file and line. Raises the ValueError of `RewardChoice.scorers`."""
        for chosen in self._choice.scorers(row):
            shape = label_shape(row["answer"])
            spec = chosen.spec
            if spec.right_answers is None or spec.is_async or (spec.isolated and shape in ("0", "-0")):
                continue
            key = (chosen.label, shape)
            if key not in self._seen and len(self._seen) < _MAX_KEPT:
                self._seen[key] = _Seen(chosen=chosen, row=row, where=where)
            self._counts[key] += 1

    def describe(self) -> list[str]:
        """Scores the labels; returns the lines of a report of labels that are not awarded, empty without such labels.

        Raises ValueError if ``right_answers`` raises or returns a wrong type, and if a worker does not start.
        """
        rewards = {key[0]: seen.chosen for key, seen in self._seen.items()}
        lines: list[str] = []
        for label, chosen in rewards.items():
            keys = [key for key, _ in self._counts.most_common() if key[0] == label and key in self._seen]
            if found := self._faults(chosen, keys[:MAX_SHAPES]):
                rows = sum(self._counts[key] for key in found)
                lines.append(
                    f"reward {label} does not award the plain answer to some labels; rows with labels of their form: "
                    f"{rows:,}. Correct the labels, or use another reward. The first of them:"
                )
                lines += [f"  {text}" for text in list(found.values())[:NAMED_LABELS]]
        return lines

    def _faults(self, chosen: ChosenReward, keys: Sequence[tuple[str, str]]) -> dict[tuple[str, str], str]:
        faults: dict[tuple[str, str], str] = {}
        late = 0
        with self._scorer(chosen) as score:
            for key in keys:
                seen = self._seen[key]
                label, row = seen.row["answer"], without_bytes(seen.row)
                for answer in right_answers(chosen, label):
                    output = score(RewardInput(response=answer, stopped=True, answer=label, row=row))
                    late += output.cause == "timeout"
                    if not output.exact:
                        faults[key] = f"{seen.where}: answer={short(label)}, and {short(answer)} {_got(output)}"
                        break
                if late >= _MAX_LATE:
                    break
        return faults

    @contextmanager
    def _scorer(self, chosen: ChosenReward) -> Iterator[Callable[[RewardInput], RewardOutput]]:
        """Yields a function that scores one answer; an isolated reward scores the answer in a worker process."""
        if not chosen.spec.isolated:
            yield lambda given: score_sync(chosen.spec, [given], chosen.config)[0][0]
            return
        log = LimitedLog(None, max_bytes=0)
        worker = RewardWorker([chosen.config], log=log.descriptor, sandbox=reward_sandbox(self._choice, [chosen]))
        try:
            yield lambda given: worker.score([given], chosen.config)[0]
        except RuntimeError as error:
            raise ValueError(f"reward {chosen.label}: {error}") from error
        finally:
            worker.process.stop()
            worker.process.close_pipes()
            log.close()


def right_answers(chosen: ChosenReward, label: str) -> Sequence[str]:
    """Returns the right answers that the reward's ``right_answers`` makes from a label.

    Raises ValueError if ``right_answers`` raises or returns a wrong type.
    """
    assert chosen.spec.right_answers is not None
    try:
        answers: Any = chosen.spec.right_answers(label, chosen.config)
    except Exception as error:  # plug-in code
        raise ValueError(f"reward {chosen.label}: right_answers({label!r}): {plugin_error_text(error)}") from error
    if isinstance(answers, list | tuple) and all(isinstance(answer, str) for answer in answers):
        return answers
    raise ValueError(f"reward {chosen.label}: right_answers returned {shown(answers)}. Return a list of texts.")


def _got(output: RewardOutput) -> str:
    return f"gets {output.reward:g}." if output.reward is not None else f"gets no reward: {output.reason[:120]}."


def short(text: str) -> str:
    """Returns an answer or a label for a report: quoted, and shortened in the middle if it is long."""
    return repr(text if len(text) <= 60 else f"{text[:28]}…{text[-28:]}").replace("\\\\", "\\")
