"""Opens prompt sources: a generated task, files, or a plug-in, each with its rows in an endless order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from relax_core.config.modality import modality_of_row
from relax_core.config.schema import DataConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, DataRow, EvalSet, PromptSource
from relax_core.data import generated
from relax_core.data.data_files import RowFile, open_rows
from relax_core.data.paths import FilePart, data_files, data_parts
from relax_core.data.plugin_source import PluginRows, names_plugin, open_plugin_rows, row_keys
from relax_core.data.row_order import MixedSource, Mixture, apportion, row_of

GENERATED_KEYS = ("prompt", "answer")


def make_source(config: DataConfig, *, seed: int, eval_rows: int, offline: Offline | None = None) -> PromptSource:
    """Returns the source that ``config`` describes.

    ``eval_rows`` is the number of held-out rows that an evaluation scores. ``offline`` is the kind of rows that an
    objective trains on without engines; None for prompts.

    Raises ValueError (key, value, fix) for an unusable task or file, and for a modality of data.mix without rows.
    """
    source = _unmixed_source(config, seed=seed, eval_rows=eval_rows, offline=offline)
    return source if config.mix is None else MixedSource(source, config.mix, seed=seed, shuffle=config.shuffle)


def _unmixed_source(config: DataConfig, *, seed: int, eval_rows: int, offline: Offline | None) -> PromptSource:
    given = [config.task, config.path, config.paths]
    if names_plugin(config):
        return _file_source(config, seed=seed, eval_rows=eval_rows, offline=offline)
    if sum(setting is not None for setting in given) != 1:
        raise ValueError(
            f"data.task={config.task}, data.path={config.path}, data.paths={config.paths}: set exactly one of them, a "
            "generated task, a file, or several files."
        )
    if config.task is not None:
        if offline not in (None, "demonstrations"):
            raise ValueError(
                f"data.task={config.task}: a generated task has prompts with answers, and no {offline}. Use a file, "
                "data=file data.path=FILE."
            )
        return GeneratedSource(
            config.task,
            rows=config.size,
            held_out=_eval_count(eval_rows, available=config.eval_size, where=f"data.eval_size={config.eval_size}"),
            seed=seed,
            shuffle=config.shuffle,
        )
    return _file_source(config, seed=seed, eval_rows=eval_rows, offline=offline)


def _file_source(config: DataConfig, *, seed: int, eval_rows: int, offline: Offline | None) -> FileSource:
    parts, files = _opened(config, offline)
    kept = _held_out_counts(config, files)
    training = FirstRows(files, [len(file) - count for file, count in zip(files, kept, strict=True)])
    if config.eval_path is not None:
        held_out = rows_of(config.eval_path, config, key="data.eval_path", offline=offline)
        where = f"data.eval_path={config.eval_path}"
        chosen: Iterable[tuple[RowFile, int]] = (
            (held_out, number) for number in range(_eval_count(eval_rows, available=len(held_out), where=where))
        )
    elif (own := _own_held_out(config, files)) is not None:
        count = _eval_count(eval_rows, available=len(own), where=f"data.name={config.name}")
        chosen = ((own, number) for number in range(count))
    else:
        count = _eval_count(eval_rows, available=config.eval_size, where=f"data.eval_size={config.eval_size}")
        asked = apportion(count, kept) if count else [0] * len(files)
        chosen = (
            (file, len(file) - of_file + place)
            for file, of_file, wanted in zip(files, kept, asked, strict=True)
            for place in range(wanted)
        )
    return FileSource(
        training,
        parts=_part_rows(parts, training.counts),
        weights=[part.weight for part in parts if part.weight is not None],
        held_out=read_eval_set("", chosen),
        seed=seed,
        shuffle=config.shuffle,
    )


def _opened(config: DataConfig, offline: Offline | None) -> tuple[list[FilePart], list[RowFile]]:
    """Returns the parts and the rows of each file.

    A plug-in is treated as one file. Raises ValueError as `make_source` does.
    """
    if names_plugin(config):
        return [FilePart(files=(Path(config.name),))], [open_plugin_rows(config, offline=offline)]
    parts = data_parts(config)
    key = "data.path" if config.path is not None else "data.paths"
    return parts, [_rows_of(file, config, key=key, offline=offline) for part in parts for file in part.files]


def _own_held_out(config: DataConfig, files: Sequence[RowFile]) -> RowFile | None:
    """Returns the evaluation rows that a plug-in defines; None for files and with ``data.eval_path``."""
    (first, *_) = files
    return first.held_out() if isinstance(first, PluginRows) and config.eval_path is None else None


def are_rows_named(config: DataConfig) -> bool:
    """Returns whether the configuration names files or a plug-in for training, and not a generated task."""
    return config.path is not None or config.paths is not None or names_plugin(config)


def rows_of(name: str, config: DataConfig, *, key: str, offline: Offline | None = None) -> RowFile:
    """Returns the data rows of the file, wildcard or folder that ``key`` names, with the columns of ``config``.

    Raises ValueError as `data_files` and `open_rows` do.
    """
    files = [_rows_of(file, config, key=key, offline=offline) for file in data_files(name, key=key)]
    return files[0] if len(files) == 1 else FirstRows(files, [len(file) for file in files])


def _rows_of(file: Path, config: DataConfig, *, key: str, offline: Offline | None) -> RowFile:
    try:
        return open_rows(file, row_keys(config, folder=file.parent, offline=offline))
    except ValueError as error:
        raise ValueError(f"{key}: {error}") from error


def read_eval_set(name: str, chosen: Iterable[tuple[RowFile, int]]) -> EvalSet:
    """Returns the evaluation set of the rows ``chosen`` (file, number); its field ``bad`` has the unusable rows."""
    rows: list[DataRow] = []
    bad: list[BadRow] = []
    for file, number in chosen:
        try:
            rows.append(file[number])
        except BadRow as error:
            bad.append(error)
    return EvalSet(name=name, rows=rows, bad=bad)


def _held_out_counts(config: DataConfig, files: Sequence[RowFile]) -> list[int]:
    """Returns for each file the number of rows at its end that are held out.

    The sum is ``data.eval_size``, split in proportion to the files' numbers of rows.
    """
    sizes = [len(file) for file in files]
    if config.eval_path is not None or config.eval_size == 0 or _own_held_out(config, files) is not None:
        return [0] * len(files)
    if config.eval_size < 0:
        raise ValueError(f"data.eval_size={config.eval_size}: must be at least 0 (0 holds no rows out).")
    if config.eval_size >= sum(sizes):
        source_name = config.name if names_plugin(config) else config.path
        what = source_name if source_name is not None else f"{len(files)} files together"
        raise ValueError(
            f"data.eval_size={config.eval_size}: {what} has {sum(sizes)} rows, and no row remains for training. "
            "Lower data.eval_size, or give the held-out rows as data.eval_path."
        )
    return apportion(config.eval_size, sizes)


def _part_rows(parts: Sequence[FilePart], counts: Sequence[int]) -> list[int]:
    """Returns how many training rows each part has."""
    ends = list(accumulate(len(part.files) for part in parts))
    return [sum(counts[start:end]) for start, end in zip([0, *ends], ends, strict=False)]


def _eval_count(wanted: int, *, available: int, where: str) -> int:
    if wanted > available:
        raise ValueError(
            f"eval.rows={wanted}, but {where} holds out {available} rows: lower eval.rows or hold out more."
        )
    return wanted


def file_rows(config: DataConfig, *, offline: Offline | None = None) -> tuple[RowFile, int]:
    """Returns the training rows of the configured files or plug-in, and their number.

    Raises ValueError as `make_source` does.
    """
    _, files = _opened(config, offline)
    kept = _held_out_counts(config, files)
    rows = FirstRows(files, [len(file) - count for file, count in zip(files, kept, strict=True)])
    return rows, len(rows)


def unsplit_rows(config: DataConfig, *, offline: Offline | None = None) -> RowFile | None:
    """Returns all rows of the configured files or plug-in, if they have too few rows to hold out ``data.eval_size``.

    Returns None for data with enough rows, for data with separate evaluation rows, and for a generated task. Raises
    ValueError as `make_source` does.
    """
    if config.eval_path is not None or config.eval_size <= 0 or not are_rows_named(config):
        return None
    _, files = _opened(config, offline)
    if _own_held_out(config, files) is not None or config.eval_size < sum(map(len, files)):
        return None
    return FirstRows(files, [len(file) for file in files])


class FirstRows:
    """Holds the first ``counts[i]`` rows of each file, one file after the other."""

    def __init__(self, files: Sequence[RowFile], counts: Sequence[int]) -> None:
        self._files, self.counts = files, list(counts)
        self._starts = [0, *accumulate(counts)]

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> DataRow:
        file, place = self._find(number)
        return file[place]

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        file, place = self._find(number)
        return file.where(place)

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        file, place = self._find(number)
        return file.modality(place)

    def _find(self, number: int) -> tuple[RowFile, int]:
        assert 0 <= number < len(self)
        place = bisect_right(self._starts, number) - 1
        return self._files[place], number - self._starts[place]


class GeneratedSource:
    """Holds ``rows`` examples of a generated task. Each epoch has a new order."""

    def __init__(self, task: str, *, rows: int, held_out: int, seed: int, shuffle: bool) -> None:
        generated.check_task(task)
        if rows < 1:
            raise ValueError(f"data.size={rows}: a generated task needs at least one row.")
        if task == generated.SEEDS and rows > generated.MAX_SEEDS:
            raise ValueError(f"data.size={rows}: data=seeds has at most {generated.MAX_SEEDS} rows. Lower it.")
        self._task, self._rows, self._held_out, self._seed, self._shuffle = task, rows, held_out, seed, shuffle

    def __len__(self) -> int:
        return self._rows

    def number(self, index: int) -> int:
        """Returns the number of the example at ``index`` of the endless order."""
        return row_of(index, rows=self._rows, seed=self._seed, shuffle=self._shuffle)

    def row(self, index: int) -> DataRow:
        """Returns the data row at ``index`` of the endless order."""
        return self.numbered(self.number(index))

    def numbered(self, number: int) -> DataRow:
        """Returns the data row with this number."""
        return _as_row(generated.example(self._task, split="train", seed=self._seed, index=number))

    def where(self, number: int) -> str:
        """Returns task and number of an example."""
        return f"data.task={self._task}, example {number}"

    def modality(self, number: int) -> str:
        """Returns the modality of an example."""
        return modality_of_row(self.numbered(number))

    def held_out(self) -> EvalSet:
        """Returns the held-out split."""
        rows = [
            _as_row(generated.example(self._task, split="eval", seed=self._seed, index=index))
            for index in range(self._held_out)
        ]
        return EvalSet(name="", rows=rows, parts=generated.parts_of(self._task))


def _as_row(example: generated.Example) -> DataRow:
    row: dict[str, Any] = {"prompt": example.prompt, "answer": example.answer}
    if example.part:
        row["part"] = example.part
    if example.seed is not None:
        row["seed"] = example.seed
    if example.sources:
        shown = [{"type": source.kind, source.kind: source} for source in example.sources]
        row["prompt"] = [{"role": "user", "content": [*shown, {"type": "text", "text": example.prompt}]}]
    return row


class FileSource:
    """Holds the data rows of files in an endless order. ``held_out`` has the held-out rows, which were read before.

    Without ``weights`` each epoch contains every row once, in a new order. ``parts`` has the number of successive rows
    in each part, and ``weights`` one weight for each part. With ``weights``, a `Mixture` determines the part of each
    prompt, and the rows of each part are drawn epoch by epoch.
    """

    def __init__(
        self,
        rows: RowFile,
        *,
        parts: Sequence[int],
        weights: Sequence[float],
        held_out: EvalSet,
        seed: int,
        shuffle: bool,
    ) -> None:
        self._rows, self._held_out, self._seed, self._shuffle = rows, held_out, seed, shuffle
        self._parts = parts
        self._starts = [0, *accumulate(parts)]
        self._mixture: Mixture | None = None
        if weights:
            try:
                self._mixture = Mixture(weights, seed=seed)
            except ValueError as error:
                raise ValueError(f"data.paths: {error}") from error
            if 0 in parts:
                raise ValueError(
                    f"data.paths: file {parts.index(0) + 1} has no row left to train on. Lower data.eval_size, or give "
                    "the held-out rows as data.eval_path."
                )

    def __len__(self) -> int:
        return len(self._rows)

    def number(self, index: int) -> int:
        """Returns the number of the data row at ``index`` of the endless order."""
        if self._mixture is None:
            return row_of(index, rows=len(self._rows), seed=self._seed, shuffle=self._shuffle)
        part, place = self._mixture.place(index)
        mine = row_of(place, rows=self._parts[part], seed=self._seed, shuffle=self._shuffle, stream=part)
        return self._starts[part] + mine

    def row(self, index: int) -> DataRow:
        """Returns the data row at ``index`` of the endless order.

        Raises `BadRow`, which names the file and the line.
        """
        return self._rows[self.number(index)]

    def numbered(self, number: int) -> DataRow:
        """Returns the data row with this number. Raises `BadRow` if it cannot be used."""
        return self._rows[number]

    def where(self, number: int) -> str:
        """Returns file and line of a data row."""
        return self._rows.where(number)

    def modality(self, number: int) -> str:
        """Returns the modality of a data row."""
        return self._rows.modality(number)

    def held_out(self) -> EvalSet:
        """Returns the held-out split."""
        return self._held_out
