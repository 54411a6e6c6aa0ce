"""The F1 score of SQuAD: how many words response and reference have in common.

Source: ``f1_score`` of slime (slime/rollout/rm_hub/f1.py), which is SQuAD's evaluation with HotpotQA's rule for yes and
no. Both texts are compared in lower case, without punctuation and without the articles a, an, the, as bags of words.
"yes", "no" and "noanswer" must be equal as a whole.

Departures. With ``references`` a column has a list of right answers, and the best counts, as in SQuAD's own script. A
label of articles and punctuation alone gives no reward, because no response could get one.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")


@dataclass(frozen=True)
class F1Config(RewardConfig):
    """Holds the settings of the reward; ``references`` is a column with a list of right answers, null for none."""

    name: str = "f1"
    references: str | None = None


def score(given: RewardInput, config: F1Config) -> RewardOutput:
    """Returns the best F1 score over the references, exact if it is 1; None if no reference has a word."""
    try:
        wanted = _references(given.row, given.answer, config)
    except ValueError as error:
        return RewardOutput(reward=None, reason=str(error))
    found = squad_form(given.response)
    value, best = max((_f1(found, one), one) for one in wanted)
    return RewardOutput(reward=value, exact=value == 1.0, answer=found, why=compared(found, best))


def squad_form(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def _f1(found: str, wanted: str) -> float:
    if found != wanted and (found in _WHOLE or wanted in _WHOLE):
        return 0.0
    founds, wanteds = found.split(), wanted.split()
    common = sum((Counter(founds) & Counter(wanteds)).values())
    if not common:
        return 0.0
    precision, recall = common / len(founds), common / len(wanteds)
    return (2 * precision * recall) / (precision + recall)


def _references(row: Mapping[str, Any], label: str, config: F1Config) -> Sequence[str]:
    """Returns the normal forms of the right answers; raises ValueError if none has a word."""
    given: Any = [label] if config.references is None else row.get(config.references)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{config.references}={given!r} is no list of answers, which reward.references names.")
    if not (forms := [form for one in given if (form := squad_form(str(one)))]):
        raise ValueError(f"answer={label[:60]!r} has no word besides articles. Give an answer with words.")
    return forms


def check_row(row: Mapping[str, Any], config: F1Config) -> None:
    """Raises ValueError for a label without words, and for a column of references that has no list."""
    _references(row, str(row["answer"]), config)


SPEC = RewardSpec(
    name="f1",
    summary="SQuAD's F1 score of the words",
    config=F1Config,
    score=score,
    check_row=check_row,
)
