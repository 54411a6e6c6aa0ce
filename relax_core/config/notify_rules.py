"""Parses alert rules (`notify.rules`), such as "actor/reward < 0.1 for 20 steps", and defines the named rules."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, cast

from relax_core.config.errors import nearest

Sign = Literal["<", "<=", ">", ">=", "nan"]
PRESETS = {
    "nan": ("actor/loss is nan for 1 step", "actor/grad_norm is nan for 1 step", "actor/reward is nan for 1 step"),
    "reward_collapse": ("actor/reward < 0.5 of its best for 20 steps",),
    "gap": ("actor/logprob_gap_mean > 0.05 for 5 steps",),  # with bfloat16 on a CPU the normal gap is 0.003
    # the shadow reward rejects more answers than in the first steps
    "hack": ("actor/hack_onset >= 0 for 1 step",),
    "truncation": ("actor/truncated > 0.5 for 20 steps",),
}
# Source → its metrics (docs/metrics.md). `_OPEN` matches metrics with a free last part, such as reward/NAME.
_NAMES = {
    "actor": (
        "reward reward/std reward/min reward/max exact groups_without_signal response_tokens "
        "response_tokens/min response_tokens/max response_tokens/p10 response_tokens/p50 response_tokens/p90 "
        "truncated entropy staleness_max staleness_mean loss grad_norm learning_rate updates samples tokens "
        "rows skipped_groups repeated_rows samples_per_s tokens_per_s logprob_gap_max logprob_gap_mean "
        "logprob_gap_tokens step_ms wait_ms bus_ms decode_ms logprobs_ms train_ms "
        "sync_ms checkpoint_ms push_ms stall_ms "
        "moe/max_load moe/min_load moe/entropy moe/balance_loss value/loss value/grad_norm value/return "
        "value/clip value/explained_variance shadow_denied shadow_denied/usual hack_onset"
    ),
    "rollout": (
        "generate_ms engine_ms held_ms reward_ms reward_failed samples tokens turns turns/p50 turns/p90 "
        "turns/p99 straggler_turns restarts cut_observations engine_s queue_s env_s prompt_tokens "
        "cached_share tool_calls failed_calls aborts encoded tower_passes feature_mb bad_media worker"
    ),
    "eval": "exact exact/low exact/high reward rows bad_rows unscored turns shadow shadow_gap loss surprisal "
    "kl preference_accuracy preference_margin chosen_reward rejected_reward chosen_surprisal",
    **dict.fromkeys(("actor_fwd", "reference", "critic", "teacher"), "groups version"),
    "judge_check": "accuracy",
    "run": "resumed",
    **dict.fromkeys(("ledger", "engine", "rank", "straggler", "process"), ""),
}
_OPEN = re.compile(
    r"actor/(reward_|modality/|train/|algorithm/).+|rollout/(reward|judge|ended|env|agent|tokens|bad_media|modality|"
    r"engine|reward_worker)/.+|eval/((ended|skeleton)/.+|(pass|maj)@\d+(/low|/high)?|.+/.+)|"
    r"ledger/(dropped|modality)/.+|(engine|rank|straggler|process)/.+/.+"
)
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?"
_RULE = re.compile(
    rf"(?P<number>[\w.@:-]+(?:/[\w.@:-]+)+) (?:(?P<sign>[<>]=?) (?P<bound>{_NUMBER})(?P<best> of its best)?|is nan)"
    r" for (?P<steps>[1-9]\d{0,5}) steps?"
)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """Holds an alert rule; it fires if a metric is out of range in ``steps`` consecutive records.

    ``number`` is the metric with its source, such as "actor/reward". With ``of_best`` the rule compares the mean of the
    newest ``steps`` values with ``bound`` times the best such mean so far. A rule with the sign "nan" has no bound.
    """

    words: str
    number: str
    sign: Sign
    bound: float = 0.0
    of_best: bool = False
    steps: int = 1

    @property
    def source(self) -> str:
        """Returns the source of the metric."""
        return self.number.partition("/")[0]

    @property
    def name(self) -> str:
        """Returns the name of the metric without its source."""
        return self.number.partition("/")[2]


def read_rule(words: str) -> Rule:
    """Parses a rule; raises ValueError for an invalid text."""
    found = _RULE.fullmatch(" ".join(words.split()))
    if found is None:
        raise ValueError(
            f"{words!r} is neither one of {', '.join(PRESETS)} nor a rule such as 'actor/reward < 0.1 for 20 steps', "
            "'actor/reward < 0.5 of its best for 20 steps' or 'actor/loss is nan for 1 step'"
        )
    sign, of_best = found["sign"] or "nan", found["best"] is not None
    if of_best and sign not in ("<", "<="):
        raise ValueError(f"{words!r}: 'of its best' needs < or <=, because the best is the largest mean")
    return Rule(
        words=" ".join(words.split()),
        number=found["number"],
        sign=cast(Sign, sign),
        bound=float(found["bound"] or 0.0),
        of_best=of_best,
        steps=int(found["steps"]),
    )


def number_problem(number: str) -> str | None:
    """Returns the problem of a metric that cannot exist, such as "actor/rewrad", or None if it may exist."""
    source, _, name = number.partition("/")
    if source not in _NAMES:
        return f"no record has the source {source}; the sources are {', '.join(_NAMES)}"
    known = _NAMES[source].split()
    if name in known or _OPEN.fullmatch(number):
        return None
    near = nearest(number, [f"{source}/{metric}" for metric in known])
    hint = f"nearest: {', '.join(near)}" if near else "docs/metrics.md lists all metrics"
    return f"no record has {number}; {hint}"


def read_rules(texts: Iterable[str]) -> list[Rule]:
    """Returns the rules for texts and for names of `PRESETS`, without duplicates.

    Raises ValueError for the first mistake.
    """
    words = [rule for text in texts for rule in PRESETS.get(text.strip(), (text,))]
    return [read_rule(word) for word in dict.fromkeys(words)]
