"""Computes the F1 score of SQuAD: the overlap of words between response and reference.

Source: ``f1_score`` of slime (slime/rollout/rm_hub/f1.py), which is SQuAD's evaluation with HotpotQA's rule for yes and
no. The texts are compared as bags of words, in lower case, without punctuation and without the articles a, an, the. If
response or reference is "yes", "no" or "noanswer", the texts must be equal.

Departures. ``references`` names a column with a list of right answers. The best score over the list is used, as in
SQuAD's script. A label of only articles and punctuation gives no reward, because every response would score 0.

Further departures apply unless ``public`` is set, because SQuAD's score rewards a list of guesses more than one guess.
Only the text after the last ``</think>`` is read, and a response with an unclosed ``<think>`` has no text. If this text
has answer tags or a box, only their content is the response. The score is 0 in these cases:

- More than half of the response's words are not in the reference. Only one of several alternatives can have more than
  half of the words. A list therefore scores no more than its longest item. If exactly half of the words are in the
  reference, the score is at most 0.5, the chance of a guess between two answers. Words up to "the answer is" or
  "answer:" are not counted.
- The response has different answers in tags or in boxes.
- The response has "or", "not", "<=" or a similar mark that the reference does not have.
- The reference has numbers, and the response has another number. If the reference is a number, the response must have
  this number with its sign and decimal point, outside of any range, inequality or denial. Other words are allowed.

In all other cases the score is SQuAD's score.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec, compared
from rewards.mathematics.boxed import answer_after_thinking, framed, last_boxed
from rewards.mathematics.literals import stands_alone
from rewards.questions.multiple_choice import tagged_texts

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)
_WHOLE = ("yes", "no", "noanswer")
_INTRODUCTION = re.compile(r"\banswer (?:is )?")
_RELATION = re.compile(r"[≤≥≠≈]|[<>!]=|\s[<>]\s|\\(?:leq?|geq?|neq?|lt|gt|approx)(?![A-Za-z])")
_NUMBER = re.compile(r"(?:(?<![\w.,)\]])[-−–]\s?)?\d[\d,]*(?:\.\d+)?", re.ASCII)
_NUMBER_ALONE = re.compile(r"[$€£(]*[-−–]?[$€£]?\s?\d[\d,]*(?:\.\d+)?[\s%.$)]*", re.ASCII)
_ALTERNATIVES = frozenset(
    word.replace("'", "")  # in the notation of squad_form
    for word in (
        *("or", "nor", "either", "neither", "not", "never", "cannot"),
        *("isn't", "aren't", "wasn't", "weren't", "don't", "doesn't"),
    )
)


@dataclass(frozen=True)
class F1Config(RewardConfig):
    """Holds the settings of the reward. ``references`` is a column with a list of right answers, or null.

    With ``public``, every response has SQuAD's score, also a list of guesses.
    """

    name: str = "f1"
    references: str | None = None
    public: bool = False


def score(given: RewardInput, config: F1Config) -> RewardOutput:
    """Returns the best F1 score over the references, or None if no reference has a word.

    It is exact if the score is 1.
    """
    try:
        wanted = _references(given.row, given.answer, config)
    except ValueError as error:
        return RewardOutput(reward=None, reason=str(error))
    text = given.response if config.public else _response(given.response)
    found = squad_form(text)
    values = {reference: _f1(found, squad_form(reference)) for reference in wanted}
    best = max(wanted, key=values.__getitem__)
    if not config.public:
        reasons = {reference: _not_one_answer(text, found, reference) for reference in wanted if values[reference]}
        values = {
            reference: 0.0 if reasons.get(reference) else _fair(values[reference], found, reference)
            for reference in wanted
        }
        best = max(wanted, key=values.__getitem__)
        if why := reasons.get(best):
            return RewardOutput(reward=0.0, answer=found, why=why)
    value = values[best]
    return RewardOutput(reward=value, exact=value == 1.0, answer=found, why=compared(found, squad_form(best)))


def squad_form(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and superfluous white space."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split())


def _response(text: str) -> str:
    """Returns the part of a response to compare. Empty if the response has no answer or several different answers."""
    text = answer_after_thinking(text) or ""
    if tagged := set(tagged_texts(text)):
        return tagged.pop() if len(tagged) == 1 else ""
    boxed = framed(text)
    if boxed is None:
        return text
    box = last_boxed(boxed) or ""
    return box if boxed.count("\\boxed") == boxed.count(f"\\boxed{{{box}}}") else ""


def _not_one_answer(text: str, found: str, reference: str) -> str:
    """Returns the reason why a response gets the score 0, or "" if it is scored.

    ``found`` is the normal form of the response ``text``.
    """
    of_reference = set(squad_form(reference).split())
    if named := [word for word in found.split() if word in _ALTERNATIVES and word not in of_reference]:
        return f"the response has {named[0]!r}, which is not in the reference"
    if _RELATION.search(text) and not _RELATION.search(reference):
        return "the response has a relation such as <="
    numbers, wanted = _numbers(text), _numbers(reference)
    if _is_number(reference):
        alone = numbers == wanted and stands_alone(_NUMBER.findall(text)[0], text)
        return "" if alone else f"{reference[:60]!r} is not the only number of the response"
    return "the response has a number that is not in the reference" if wanted and set(numbers) - set(wanted) else ""


def _fair(value: float, found: str, reference: str) -> float:
    """Limits the score of a response with words that are not in the reference (see the module's docstring)."""
    if not value or _is_number(reference):
        return value
    of_reference = squad_form(reference).split()
    founds = (found if "answer" in of_reference else _INTRODUCTION.split(found)[-1]).split()
    twice = 2 * sum((Counter(founds) & Counter(of_reference)).values())
    return value if twice > len(founds) else min(value, 0.5) if twice == len(founds) else 0.0


def _is_number(text: str) -> bool:
    return _NUMBER_ALONE.fullmatch(text.strip()) is not None


def _numbers(text: str) -> list[str]:
    """Returns the numbers in a text with their signs, without thousands separators and trailing zeros."""
    found = [
        number.replace(",", "").replace("−", "-").replace("–", "-").replace(" ", "") for number in _NUMBER.findall(text)
    ]
    return [number.rstrip("0").rstrip(".") if "." in number else number for number in found]


def same_numbers(text: str, reference: str) -> bool:
    """Returns whether two texts have the same numbers with the same signs and decimal points.

    squad_form removes these.
    """
    return _numbers(text) == _numbers(reference)


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
    """Returns the right answers. Raises ValueError if all consist only of articles and punctuation."""
    given: Any = [label] if config.references is None else row.get(config.references)
    if not isinstance(given, list | tuple):
        raise ValueError(f"{config.references}={given!r} is not a list of answers, as reward.references requires.")
    if not (texts := [str(reference) for reference in given if squad_form(str(reference))]):
        raise ValueError(f"answer={label[:60]!r} has no word besides articles. Give an answer with words.")
    return texts


def check_row(row: Mapping[str, Any], config: F1Config) -> None:
    """Raises ValueError for a label without words, or if the column of references is not a list."""
    _references(row, str(row["answer"]), config)


SPEC = RewardSpec(
    name="f1",
    shadow="final_answer",
    summary="SQuAD's F1 score of the words",
    config=F1Config,
    score=score,
    check_row=check_row,
)
