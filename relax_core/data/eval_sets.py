"""The sets of data rows that an evaluation asks: the held-out rows of the training data, or files by name."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import BadRow, EvalSet, PromptSource
from relax_core.data.shares import too_many_bad
from relax_core.data.sources import read_eval_set, rows_of

_FIGURES = ("exact", "reward")  # names that would clash with the names of an evaluation's metrics
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def held_out_count(config: RelaxConfig) -> int:
    """Returns how many held-out rows of the training data an evaluation asks; 0 if none of its sets is that one."""
    return config.eval.rows if config.eval.every and asks_held_out(config) else 0


def asks_held_out(config: RelaxConfig) -> bool:
    """Returns whether one of the sets is the held-out rows of the training data."""
    return not config.eval.sets or None in config.eval.sets.values()


def eval_sets(config: RelaxConfig, source: PromptSource | None) -> list[EvalSet]:
    """Returns the sets in the order of ``eval.sets``, each with at most ``eval.rows`` data rows.

    Without names, the held-out rows are the only set. ``source`` may be None if no set is its held-out rows. Raises
    ValueError (key, value, fix) for a file that cannot be used, and as `check_bad_rows` does.
    """
    sets = [_read(config, source, name, file) for name, file in (config.eval.sets or {"": None}).items()]
    for one in sets:
        check_bad_rows(one.name, len(one.rows), one.bad, most=config.data.max_bad_rows)
    return sets


def check_bad_rows(name: str, usable: int, bad: Sequence[BadRow], *, most: float) -> None:
    """Raises ValueError if all rows of an evaluation set, or more than the share ``most`` of them, cannot be used.

    The remaining rows would be another set.
    """
    rows = usable + len(bad)
    if bad and (not usable or too_many_bad(len(bad), rows, rows=rows, most=most)):
        what = f"eval.sets.{name}" if name else "the held-out rows"
        raise ValueError(
            f"{what}: {len(bad)} of {rows} rows cannot be used, more than data.max_bad_rows={most:g}. The first: "
            f"{bad[0]} Correct the data, or raise data.max_bad_rows."
        )


def _read(config: RelaxConfig, source: PromptSource | None, name: str, file: str | None) -> EvalSet:
    if file is None:
        assert source is not None
        held_out = source.held_out()
        return EvalSet(name=name, rows=held_out.rows, bad=held_out.bad, parts=held_out.parts)
    rows = rows_of(file, config.data, key=f"eval.sets.{name}")
    return read_eval_set(name, ((rows, number) for number in range(min(len(rows), config.eval.rows))))


def name_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for each name that cannot be part of a metric's name."""
    for name in config.eval.sets:
        if not _NAME.fullmatch(name) or name in _FIGURES:
            yield f"eval.sets: {name!r} is no name for a set. Use another, of letters, digits and . _ - alone."
