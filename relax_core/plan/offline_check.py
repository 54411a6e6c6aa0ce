"""Checks data rows before the start of a run that trains on them without engines: unusable rows and lengths."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, DataRow, PromptSource
from relax_core.contracts.tree import group_uid
from relax_core.data.eval_sets import NAMED_ROWS
from relax_core.data.layouts import CHOSEN, MESSAGES, REJECTED, TEXT
from relax_core.plan.prompt_maker import positions, run_tokenizer
from relax_core.rollout.offline_rows import OfflineRows, partner_rows

CONVERTED_BYTES = 4 << 20  # text that is converted to tokens, the longest rows first


@dataclass(kw_only=True)
class OfflineLook:
    """Holds the result of the check. ``longest`` is the number of tokens of the longest converted sample.

    ``most_rows`` is the number of rows that the trainer computes for the largest converted group. ``rest`` is the size
    in bytes of the longest sample that was not converted, 0 if all were converted. ``bad`` maps a reason to the number
    of bad rows, and ``texts`` maps the numbers of bad rows to their errors.
    """

    looked: int = 0
    longest: int = 0
    most_rows: int = 0
    rest: int = 0
    media: bool = False
    bad: Counter[str] = field(default_factory=Counter)
    texts: dict[int, str] = field(default_factory=dict)

    def named(self) -> list[str]:
        """Returns the errors of the first bad rows."""
        return [text for _, text in sorted(self.texts.items())[:NAMED_ROWS]]

    def leave_out(self, number: int, error: BadRow) -> None:
        """Counts a bad row."""
        self.bad[error.reason] += 1
        self.texts[number] = f"row {number}: {error}"


def look_at_rows(config: RelaxConfig, source: PromptSource, *, kind: Offline, step: int) -> OfflineLook:
    """Reads every ``step``-th row of the source, and converts the longest rows to tokens.

    Rows with images, videos or sounds are read and not converted. Without a usable tokenizer no row is converted.
    """
    look = OfflineLook()
    sizes: list[tuple[int, int]] = []
    for number in range(0, len(source), step):
        look.looked += 1
        try:
            row = source.numbered(number)
        except BadRow as error:
            look.leave_out(number, error)
            continue
        sizes.append((-_size(row), number))
    try:
        tokenizer = run_tokenizer(config)
    except ValueError:  # another check reports it
        tokenizer = None
    if tokenizer is None:
        return look
    context = config.engine.context_length or positions(config)
    rows = OfflineRows(
        tokenizer=tokenizer, kind=kind, max_tokens=context or 1 << 30, banned=config.rollout.banned_token_ids or ()
    )
    left = CONVERTED_BYTES
    for size, number in sorted(sizes):
        left += size
        if left < 0 and look.longest:
            look.rest = -size
            break
        row, where = source.numbered(number), source.where(number)
        if rows.sources(row):
            look.media = True
            continue
        partners = partner_rows(number, count=len(source), read=source.numbered)
        try:
            tree = rows.tree(row, where=where, uid=group_uid(0), version=0, partners=partners)
        except BadRow as error:
            look.leave_out(number, error)
            continue
        look.most_rows = max(look.most_rows, tree.computed_rows)
        look.longest = max(look.longest, int(tree.runs.positions().max()) + 1)
    return look


def _size(row: DataRow) -> int:
    """Returns the number of bytes of a row's conversations, without media."""
    found = [row[name] for name in (MESSAGES, CHOSEN, REJECTED, TEXT) if name in row] or [row["prompt"], row["answer"]]
    return len(msgspec.json.encode(found, enc_hook=lambda value: ""))
