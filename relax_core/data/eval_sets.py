"""Opens the evaluation sets (held-out rows, or named files), and computes confidence intervals of shares."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, EvalSet, PromptSource
from relax_core.data.data_files import RowFile
from relax_core.data.sources import make_source, read_eval_set, rows_of, unsplit_rows

Z_95 = 1.959964  # the normal quantile of a two-sided interval of 95 %
Z_SURE = 4.0  # the normal quantile for an error probability of 1/30,000
NAMED_ROWS = 5  # the number of bad rows that a report names; this number of bad rows does not end a run


def wilson(share: float, count: float, *, z: float = Z_95) -> tuple[float, float]:
    """Returns the confidence interval of a share that was observed in ``count`` independent cases (at least 1).

    Source: Wilson, Probable inference, the law of succession, and statistical inference (JASA 22, 1927), without
    continuity correction. The interval is always within 0..1, and its width is above 0 even if all cases were equal.
    """
    scale = 1.0 + z * z / count
    middle = (share + z * z / (2.0 * count)) / scale
    half = z / scale * math.sqrt(share * (1.0 - share) / count + (z / (2.0 * count)) ** 2)
    return max(0.0, middle - half), min(1.0, middle + half)


def too_many_bad(bad: int, checked: int, *, rows: int, most: float) -> bool:
    """Returns whether more than the share ``most`` of all ``rows`` is bad. So far ``bad`` of ``checked`` rows are bad.

    If all rows were checked, the result depends only on the share of bad rows. Otherwise a few bad rows may be chance,
    and the result is True only for more than `NAMED_ROWS` bad rows and a share that is significantly above ``most``
    (`Z_SURE`).
    """
    if checked >= rows or most == 0.0:
        return bad > most * rows
    return bad > NAMED_ROWS and wilson(bad / checked, checked, z=Z_SURE)[0] > most


_FIGURES = ("exact", "reward")  # names that would collide with the names of an evaluation's metrics
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def held_out_count(config: RelaxConfig) -> int:
    """Returns how many held-out rows of the training data an evaluation uses; 0 if all its sets are files."""
    return config.eval.rows if config.eval.every and asks_held_out(config) else 0


def asks_held_out(config: RelaxConfig) -> bool:
    """Returns whether the evaluation sets include the held-out rows of the training data."""
    return not config.eval.sets or None in config.eval.sets.values()


def eval_sets(config: RelaxConfig, source: PromptSource | None, *, offline: Offline | None = None) -> list[EvalSet]:
    """Returns the sets in the order of ``eval.sets``, each with at most ``eval.rows`` data rows.

    Without names in ``eval.sets``, the held-out rows are the only set. ``source`` provides the held-out rows; it may be
    None if all sets are files. ``offline`` is the kind of rows that are trained without engines. Raises ValueError
    (key, value, fix) for a file that cannot be used, and as `check_bad_rows` does.
    """
    return _all_sets(config, None if source is None else source.held_out(), offline)


def eval_sets_alone(config: RelaxConfig) -> list[EvalSet]:
    """Returns the sets of an evaluation without training, as `eval_sets` does.

    If the data has too few rows for a held-out split, its first ``eval.rows`` rows are used instead.
    """
    held_out = None
    if asks_held_out(config):
        rows = unsplit_rows(config.data)
        if rows is None:
            held_out = make_source(config.data, seed=config.seed, eval_rows=config.eval.rows).held_out()
        else:
            held_out = _first_rows("", rows, config.eval.rows)
    return _all_sets(config, held_out, None)


def _all_sets(config: RelaxConfig, held_out: EvalSet | None, offline: Offline | None) -> list[EvalSet]:
    sets = [_read(config, held_out, name, file, offline) for name, file in (config.eval.sets or {"": None}).items()]
    for eval_set in sets:
        check_bad_rows(eval_set.name, len(eval_set.rows), eval_set.bad, most=config.data.max_bad_rows)
    return sets


def check_bad_rows(name: str, usable: int, bad: Sequence[BadRow], *, most: float) -> None:
    """Raises ValueError if all rows of an evaluation set, or more than the share ``most`` of them, cannot be used.

    The usable rows alone would be a different evaluation set.
    """
    rows = usable + len(bad)
    if bad and (not usable or too_many_bad(len(bad), rows, rows=rows, most=most)):
        what = f"eval.sets.{name}" if name else "the held-out rows"
        raise ValueError(
            f"{what}: {len(bad)} of {rows} rows cannot be used, more than data.max_bad_rows={most:g}. The first: "
            f"{bad[0]} Correct the data, or raise data.max_bad_rows."
        )


def _read(
    config: RelaxConfig, held_out: EvalSet | None, name: str, file: str | None, offline: Offline | None
) -> EvalSet:
    if file is None:
        assert held_out is not None
        return EvalSet(name=name, rows=held_out.rows, bad=held_out.bad, parts=held_out.parts)
    return _first_rows(name, rows_of(file, config.data, key=f"eval.sets.{name}", offline=offline), config.eval.rows)


def _first_rows(name: str, rows: RowFile, most: int) -> EvalSet:
    return read_eval_set(name, ((rows, number) for number in range(min(len(rows), most))))


def name_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields a problem for each evaluation set with a name that cannot be part of a metric's name."""
    for name in config.eval.sets:
        if not _NAME.fullmatch(name) or name in _FIGURES:
            yield f"eval.sets: {name!r} is not a name for a set. Use only letters, digits and . _ -"
