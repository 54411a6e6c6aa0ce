"""Prompt sources: a generated task, or rows of a JSONL or Parquet file, behind one random-access order."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from relax_core.config.schema import DataConfig
from relax_core.contracts.data import DataRow, PromptSource
from relax_core.data import generated
from relax_core.data.files import RowFile, open_rows
from relax_core.data.order import row_of

GENERATED_KEYS = ("prompt", "answer")


def make_source(config: DataConfig, *, seed: int, eval_rows: int) -> PromptSource:
    """The source that ``config`` describes. ``eval_rows`` is how many held-out rows an evaluation scores.

    Raises ValueError (key, value, fix) for a task or file that cannot serve.
    """
    if (config.task is None) == (config.path is None):
        raise ValueError(
            f"data.task={config.task}, data.path={config.path}: set exactly one of them, a generated task or a file."
        )
    if config.task is not None:
        return GeneratedSource(
            config.task,
            rows=config.size,
            held_out=_eval_count(eval_rows, available=config.eval_size, where=f"data.eval_size={config.eval_size}"),
            seed=seed,
            shuffle=config.shuffle,
        )
    assert config.path is not None
    return _file_source(config, Path(config.path), seed=seed, eval_rows=eval_rows)


def _file_source(config: DataConfig, path: Path, *, seed: int, eval_rows: int) -> FileSource:
    def rows_of(file: Path) -> RowFile:
        return open_rows(file, prompt_key=config.prompt_key, answer_key=config.answer_key)

    rows = rows_of(path)
    if config.eval_path is not None:
        held_out, first, train = rows_of(Path(config.eval_path)), 0, len(rows)
        available, where = len(held_out), f"data.eval_path={config.eval_path}"
    else:
        held_out, first, train = rows, len(rows) - config.eval_size, len(rows) - config.eval_size
        available, where = config.eval_size, f"data.eval_size={config.eval_size}"
        if train < 1:
            raise ValueError(
                f"data.eval_size={config.eval_size}: {path} has {len(rows)} rows, none is left to train on. "
                "Lower data.eval_size, or give the held-out rows as data.eval_path."
            )
    count = _eval_count(eval_rows, available=available, where=where)
    return FileSource(
        rows,
        train=train,
        held_out=[held_out[first + place] for place in range(count)],
        seed=seed,
        shuffle=config.shuffle,
    )


def _eval_count(wanted: int, *, available: int, where: str) -> int:
    if wanted > available:
        raise ValueError(
            f"eval.rows={wanted}, but {where} holds out {available} rows: lower eval.rows or hold out more."
        )
    return wanted


def file_rows(config: DataConfig) -> tuple[RowFile, int]:
    """The file of ``data.path`` and how many of its first rows are trained on. Raises ValueError as `make_source`."""
    assert config.path is not None
    rows = open_rows(Path(config.path), prompt_key=config.prompt_key, answer_key=config.answer_key)
    return rows, len(rows) if config.eval_path is not None else len(rows) - config.eval_size


class GeneratedSource:
    """``rows`` examples of a generated task, over and over, a new order each epoch."""

    def __init__(self, task: str, *, rows: int, held_out: int, seed: int, shuffle: bool) -> None:
        generated.check_task(task)
        if rows < 1:
            raise ValueError(f"data.size={rows}: a generated task needs at least one row.")
        self._task, self._rows, self._held_out, self._seed, self._shuffle = task, rows, held_out, seed, shuffle

    def row(self, index: int) -> DataRow:
        """The row at place ``index`` of the endless order."""
        place = row_of(index, rows=self._rows, seed=self._seed, shuffle=self._shuffle)
        return _as_row(generated.example(self._task, split="train", seed=self._seed, index=place))

    def eval_rows(self) -> list[DataRow]:
        return [
            _as_row(generated.example(self._task, split="eval", seed=self._seed, index=index))
            for index in range(self._held_out)
        ]


def _as_row(example: generated.Example) -> DataRow:
    return {"prompt": example.prompt, "answer": example.answer}


class FileSource:
    """The first ``train`` rows of a file, over and over, a new order each epoch; ``held_out`` is already read."""

    def __init__(self, rows: RowFile, *, train: int, held_out: Sequence[DataRow], seed: int, shuffle: bool) -> None:
        self._rows, self._train, self._held_out, self._seed, self._shuffle = rows, train, held_out, seed, shuffle

    def row(self, index: int) -> DataRow:
        """The row at place ``index`` of the endless order. Raises ValueError that names the file's row."""
        return self._rows[row_of(index, rows=self._train, seed=self._seed, shuffle=self._shuffle)]

    def eval_rows(self) -> list[DataRow]:
        return list(self._held_out)
