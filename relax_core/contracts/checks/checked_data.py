"""Data sources whose rows are checked where they enter; see `relax_core.contracts.checks.checked`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relax_core.contracts.checks.foreign_values import clean_value
from relax_core.contracts.checks.plugin_results import Contained, PluginFunction
from relax_core.contracts.data import BaseDataSource, DataSourceSpec

A_ROW = "a mapping with text keys, such as {'prompt': …, 'answer': …}"


def checked_data_source(spec: DataSourceSpec) -> DataSourceSpec:
    """Returns the source, whose methods raise `WrongResult` for what is no source, no number of rows and no row."""
    source = PluginFunction("data source", spec.name, spec.open)

    def checked_open(config: Any) -> BaseDataSource:
        came: Any = spec.open(config)
        if not isinstance(came, BaseDataSource):
            raise source.wrong(came, "an object of a class under BaseDataSource")
        return _CheckedDataSource(came, spec.name)

    return replace(spec, open=checked_open)


class _CheckedDataSource(BaseDataSource):
    """An open source whose results are checked."""

    def __init__(self, rows: BaseDataSource, name: str) -> None:
        self._rows = rows
        self._of_len = PluginFunction("data source", name, rows.__len__)
        self._of_row = PluginFunction("data source", name, rows.__getitem__)
        self._of_where = PluginFunction("data source", name, rows.where)
        self._of_held_out = PluginFunction("data source", name, rows.held_out)

    def __len__(self) -> int:
        with Contained():
            came: Any = type(self._rows).__len__(self._rows)
        if isinstance(came, bool) or not isinstance(came, int) or came < 1:
            raise self._of_len.wrong(came, "the number of rows, 1 or more")
        return came

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with Contained():
            came = self._rows[number]
        return _row(came, self._of_row)

    def where(self, number: int) -> str:
        with Contained():
            came: Any = self._rows.where(number)
        if not isinstance(came, str):
            raise self._of_where.wrong(came, "text")
        return came

    def held_out(self) -> Sequence[Mapping[str, Any]] | None:
        with Contained():
            came: Any = self._rows.held_out()
        if came is not None and (isinstance(came, str | Mapping) or not isinstance(came, Sequence)):
            raise self._of_held_out.wrong(came, "a sequence of rows, or None")
        return came if came is None else [_row(row, self._of_held_out) for row in came]


def _row(came: Any, source: PluginFunction) -> Mapping[str, Any]:
    if not isinstance(came, Mapping) or not all(isinstance(key, str) for key in came):
        raise source.wrong(came, A_ROW)
    row: Mapping[str, Any] = clean_value(came)
    return row
