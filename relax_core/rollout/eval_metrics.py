"""Estimates accuracy, pass@k and maj@k from an evaluation's answers, with 95 % intervals."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from statistics import fmean, variance

import numpy as np

from relax_core.contracts.reward import RewardOutput
from relax_core.data.eval_sets import Z_95, wilson

MAX_SAMPLES = 256  # answers per prompt
_NUMBER = re.compile(r"[+-]?[0-9]{1,40}(\.[0-9]{0,40})?|[+-]?\.[0-9]{1,40}")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(,[0-9]{3})+(\.[0-9]+)?")
_LATEX_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]*)\}\{([^{}]*)\}")
_NO_FORMATTING = str.maketrans("", "", "$ {}()")
FEWEST_VOTERS = 3  # with two voters, the tie-break would decide


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Holds one answer to a prompt.

    ``vote`` is the vote of this answer in majority votes (`vote_of`), or None. ``reward`` is None if the reward could
    not be computed. ``cut`` is True if the answer reached the token limit. ``tokens`` is the number of sampled tokens.
    An episode of several turns is one answer; ``ended`` is then the reason of the episode's end, else empty. ``why`` is
    the reward's explanation: the compared texts, or the reason for a missing reward. ``shadow`` is 1 if the shadow
    reward judges the answer right, 0 if it does not, and None if it did not score the answer.
    """

    text: str
    exact: bool
    reward: float | None
    vote: str | None
    cut: bool
    tokens: int
    turns: int = 1
    ended: str = ""
    why: str = ""
    shadow: float | None = None


def vote_of(output: RewardOutput, text: str, *, label: str) -> str | None:
    """Returns the vote of an answer, or None for no vote; ``text`` is the response, empty if it was cut.

    Answers that the reward judges equal have the same vote. If the reward extracted an answer, an exact answer votes
    for the label, a wrong number votes for its value, and another wrong answer for its text. If the reward extracts no
    answers, the text of the response is the vote.
    """
    if output.answer is None:
        return text.strip() or None
    if not output.answer:
        return None
    return f"= {label}" if output.exact else _as_number(output.answer)


def _as_number(answer: str) -> str:
    """Returns a number or fraction as a reduced fraction; other text is returned without extra white space."""
    plain = _LATEX_FRACTION.sub(r"\1/\2", answer).translate(_NO_FORMATTING)
    plain = plain.replace(",", "") if _THOUSANDS.fullmatch(plain) else plain
    above, _, below = plain.partition("/")
    if not _NUMBER.fullmatch(above) or not _NUMBER.fullmatch(below or "1") or not Fraction(below or "1"):
        return " ".join(answer.split())
    return str(Fraction(above) / Fraction(below or "1"))


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Holds an estimate over an evaluation's prompts, with the limits of the 95 % interval."""

    value: float
    low: float
    high: float


def accuracy(answers: Sequence[Sequence[Answer]]) -> Estimate:
    """Returns the share of exact answers; ``answers`` must have the same number of answers for every prompt."""
    return _share([fmean(answer.exact for answer in of_prompt) for of_prompt in answers], answers_each=len(answers[0]))


def mean_reward(answers: Sequence[Sequence[Answer]]) -> Estimate | None:
    """Returns the mean reward of all answers with a reward, with the normal interval of the prompts' means.

    Returns None if no answer has a reward. Rewards are unbounded, so Wilson's interval does not apply to them.
    """
    known = [[answer.reward for answer in of_prompt if answer.reward is not None] for of_prompt in answers]
    rewards = [reward for of_prompt in known for reward in of_prompt]
    if not rewards:
        return None
    means = [fmean(of_prompt) for of_prompt in known if of_prompt]
    half = Z_95 * math.sqrt(variance(means) / len(means)) if len(means) > 1 else 0.0
    value = fmean(rewards)
    return Estimate(value=value, low=value - half, high=value + half)


def shadow_values(answers: Sequence[Sequence[Answer]]) -> dict[str, float]:
    """Returns two metrics of the answers with a shadow score: shadow accuracy, and accuracy minus shadow accuracy."""
    scored = [answer for of_prompt in answers for answer in of_prompt if answer.shadow is not None]
    if not scored:
        return {}
    shadow = fmean(answer.shadow or 0.0 for answer in scored)
    return {"shadow": shadow, "shadow_gap": fmean(answer.exact for answer in scored) - shadow}


def pass_at_k(answers: Sequence[Sequence[Answer]], k: int) -> Estimate:
    """Returns the probability that at least one of ``k`` answers to a prompt is right."""
    estimates = [pass_chance(len(of_prompt), sum(answer.exact for answer in of_prompt), k) for of_prompt in answers]
    return _share(estimates, answers_each=len(answers[0]) // k)


def majority_at_k(answers: Sequence[Sequence[Answer]], k: int) -> Estimate:
    """Returns the probability that the most frequent of ``k`` answers to a prompt is right; ties break at random."""
    return _share([majority_chance(of_prompt, k) for of_prompt in answers], answers_each=len(answers[0]) // k)


def k_values(samples: int) -> list[int]:
    """Returns the values of k for pass@k and maj@k: 2, 4, 8 … and ``samples``, the number of answers per prompt."""
    powers = [2**power for power in range(1, samples.bit_length()) if 2**power < samples]
    return [*powers, samples] if samples > 1 else []


def pass_chance(answers: int, right: int, k: int) -> float:
    """Returns the probability that ``k`` of ``answers`` answers, drawn without replacement, include a right answer.

    ``right`` of the answers are right. Source: the unbiased estimator of pass@k by Chen et al., Evaluating large
    language models trained on code (2021), equation 1: 1 - C(n - c, k) / C(n, k) with n ``answers`` and c ``right``.
    """
    return 1.0 - math.comb(answers - right, k) / math.comb(answers, k)


def majority_chance(answers: Sequence[Answer], k: int) -> float:
    """Returns the probability that the most frequent of ``k`` answers, drawn without replacement, is right.

    If several votes are equally frequent, one of them is chosen at random. A draw without any vote is wrong. A vote is
    right if the first answer with this vote is exact. The result is the mean over all draws (a U-statistic), so it is
    an unbiased estimate of maj@k. Source of the majority vote: Wang et al., Self-consistency (2022).
    """
    votes = Counter(answer.vote for answer in answers if answer.vote is not None)
    right: dict[str | None, bool] = {}
    for answer in answers:
        right.setdefault(answer.vote, answer.exact)
    won = 0.0
    for vote, count in votes.items():
        if right[vote]:
            other_counts = [votes[other_vote] for other_vote in votes if other_vote != vote]
            won += _draws_won(count, others=other_counts, total=len(answers), k=k)
    return won / math.comb(len(answers), k)


def _draws_won(mine: int, *, others: Sequence[int], total: int, k: int) -> float:
    """Returns in how many draws of ``k`` answers a vote wins; a tie with j other votes adds 1 / (j + 1).

    The vote has ``mine`` answers, and other votes have the counts ``others``. For each number x of drawn answers with
    this vote, the code counts the ways to draw the other k - x answers so that no other vote is drawn more than x
    times. The ways are counted by the number of other votes that are drawn exactly x times. They are the coefficients
    of a product of polynomials in z (drawn answers) and u (votes drawn x times).
    """
    won = 0.0
    for x in range(1, min(mine, k) + 1):
        small = total - mine - sum(count for count in others if count >= x)  # no vote, or a rarer vote
        ways = np.zeros((k - x + 1, (k - x) // x + 1))
        ways[:, 0] = [math.comb(small, drawn) for drawn in range(k - x + 1)]
        for count in (count for count in others if count >= x):
            before, ways = ways, np.zeros_like(ways)
            for drawn in range(min(x - 1, k - x) + 1):
                ways[drawn:] += math.comb(count, drawn) * before[: k - x + 1 - drawn]
            ways[x:, 1:] += math.comb(count, x) * before[: max(0, k - 2 * x + 1), :-1]
        shared = 1.0 / np.arange(1, ways.shape[1] + 1)
        won += math.comb(mine, x) * float(ways[k - x] @ shared)
    return won


def _share(estimates: Sequence[float], *, answers_each: int) -> Estimate:
    """Returns the mean of the prompts' shares, with Wilson's interval for an effective number of answers.

    Prompts are independent draws, but the answers to one prompt are not independent. Let N prompts have shares with the
    mean p and the variance v. The uncertainty of p then equals the uncertainty from N p (1 - p) / v independent
    answers. (This is the design effect of Kish, Survey Sampling, 1965, used in this way by Korn and Graubard, Survey
    Methodology 24, 1998.) The effective number is at least one answer per prompt, and at most ``answers_each`` answers
    per prompt.
    """
    prompts = len(estimates)
    value = fmean(estimates)
    spread = variance(estimates, value) if prompts > 1 else 0.0
    most = float(prompts * answers_each)
    cases = min(most, max(float(prompts), prompts * value * (1.0 - value) / spread)) if spread > 0.0 else most
    low, high = wilson(value, cases)
    return Estimate(value=value, low=low, high=high)
