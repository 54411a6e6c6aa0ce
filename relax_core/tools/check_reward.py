"""`relax check-reward [key=value …]` finds wrong answers that a run's reward rates as good, before a model finds them.

The arguments are the same as for a run. The reward scores made-up answers to rows of the run's data. A wrong answer is
awarded if its gain over an empty answer is more than a fifth of a right answer's gain.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.plugin_results import WrongResult
from relax_core.data.sources import make_source
from relax_core.observe.panel import ShownConsole
from relax_core.observe.standard_streams import unread_streams
from relax_core.rollout.rewards.reward_audit import AUDITED_ROWS, RewardAudit, audit_run_reward, audited_rows

SOUND, AWARDS_WRONG, USAGE = 0, 1, 2
_SHOWN_MISSES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0 if no family of wrong answers is awarded above the limit, 1 if one is, and 2 for wrong input."""
    parser = argparse.ArgumentParser(prog="relax check-reward", description=__doc__)
    parser.add_argument("words", nargs="*", metavar="key=value", help="keys of a run: reward=math data.path=FILE")
    parser.add_argument("--rows", type=int, default=AUDITED_ROWS, help=f"rows of the data; {AUDITED_ROWS}")
    parser.add_argument("--limit", type=float, help="share of the rows of a family; reward.audit_limit")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    given = parser.parse_intermixed_args(arguments)
    try:
        if given.rows < 1 or not 0.0 <= (given.limit or 0.0) < 1.0:
            raise ValueError(f"--rows={given.rows} --limit={given.limit}: use 1 row or more, and a limit in [0, 1).")
        config = load_config(given.words)
        limit = config.reward.audit_limit if given.limit is None else given.limit
        audit = _audit(config, most=given.rows)
    except (ConfigError, ValueError, OSError, WrongResult, RuntimeError) as error:
        print(f"relax: {error}", file=sys.stderr)
        return USAGE
    above = audit.above(limit)
    if given.json:
        print(json.dumps(_record(audit, above), ensure_ascii=False))
    else:
        _print(ShownConsole(), audit, above, reward=config.reward.name, limit=limit)
    return AWARDS_WRONG if above else SOUND


def _audit(config: RelaxConfig, *, most: int) -> RewardAudit:
    """Audits the reward. Raises ValueError if the reward needs a run, or if no row has a prompt and a label."""
    source = make_source(config.data, seed=config.seed, eval_rows=0)
    rows = list(audited_rows(source, most=most))
    if not rows:
        raise ValueError(f"data: none of the {len(source):,} rows has a prompt and a label, which the check needs.")
    return audit_run_reward(config.reward, rows, workers=config.rollout.reward_workers)


def _record(audit: RewardAudit, above: Sequence[str]) -> dict[str, Any]:
    return {
        "rows": audit.rows,
        "judged": audit.judged,
        "seconds": audit.seconds,
        "wrong_share": audit.wrong_share,
        "missed_share": audit.missed_share,
        "above": list(above),
        "missed": list(audit.missed),
        "right": audit.right,
        "not_taken": list(audit.not_taken),
        "families": {name: vars(family) | {"share": family.share} for name, family in audit.families.items()},
    }


def _print(console: Any, audit: RewardAudit, above: Sequence[str], *, reward: str, limit: float) -> None:
    wrong = sum(family.answers for family in audit.families.values())
    console.print(
        f"reward={reward}: {audit.judged} of {audit.rows} rows, {audit.seconds:.1f} s; {wrong:,} wrong answers of "
        f"{len(audit.families)} families, {audit.wrong_share:.2%} awarded; {audit.right:,} right answers, "
        f"{audit.missed_share:.2%} not awarded",
        highlight=False,
    )
    if scored := audit.above(0.0):
        table = Table(show_edge=False)
        table.add_column("family")
        table.add_column("rows", justify="right")
        table.add_column("the worst answer")
        for name in scored:
            family = audit.families[name]
            table.add_row(Text(name), f"{family.share:.0%}", Text(family.worst))
        console.print(table)
    for text in audit.missed[:_SHOWN_MISSES]:
        console.print(Text(f"not awarded: {text}"))
    if audit.not_taken:
        console.print(Text(f"forms that the reward does not take: {'; '.join(audit.not_taken)}"))
    if audit.without:
        console.print(f"{audit.without:,} answers have no reward.", highlight=False)
    if above:
        console.print(
            f"{len(above)} families are awarded in more than {limit:.0%} of the rows: a model will learn them. Use a "
            "stricter reward or rule (docs/rewards.md), or check the labels.",
            highlight=False,
        )
    else:
        console.print(f"No family is awarded in more than {limit:.0%} of the rows.", highlight=False)


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
