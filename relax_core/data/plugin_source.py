"""Opens the data rows of the plug-in that ``data.name`` names and ``data.config`` configures."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from relax_core.config.modality import modality_of_row
from relax_core.config.plugin_types import plugin_config
from relax_core.config.redaction import packed_text
from relax_core.config.schema import DataConfig
from relax_core.contracts.algorithm import Offline
from relax_core.contracts.data import BadRow, BaseDataSource, DataRow
from relax_core.data.data_files import RowKeys, check_row
from relax_core.data.row_media import MediaColumns
from relax_core.registry import find_data_source, is_file_plugin, names, plugin_error_text

DIGESTED_ROWS = 4096  # number of evenly spread rows that are hashed for the digest of a source
_newest: dict[bytes, BaseDataSource] = {}  # the open source of this process, at most one


def row_keys(config: DataConfig, *, folder: Path | None = None, offline: Offline | None = None) -> RowKeys:
    """Returns the keys of a row; ``offline`` is the kind of rows that are trained without engines.

    Relative paths begin at ``data.media_root``. If it is not set, they begin at ``folder``, the data file's folder.
    """
    root = Path(config.media_root) if config.media_root is not None else folder or Path()
    return RowKeys(
        prompt=config.prompt_key,
        answer=config.answer_key,
        media=MediaColumns(columns=config.media_keys.columns, root=root.absolute(), place=config.media_place),
        last_assistant=config.last_assistant,
        offline=offline,
    )


def names_plugin(config: DataConfig) -> bool:
    """Returns whether ``data.name`` names a plug-in, which is a file or an installed package.

    Returns False for an option of `data` that is not a plug-in.
    """
    return is_file_plugin(config.name) or config.name in names("data")


def source_config(config: DataConfig) -> Any:
    """Returns the plug-in's configuration.

    Raises ValueError for an unknown plug-in, and for a value that the plug-in refuses.
    """
    found = plugin_config("data", config.name, config.config, section="data.config")
    find_data_source(config.name).check(found)
    return found


def is_configured(config: DataConfig) -> bool:
    """Returns whether the plug-in exists and accepts its configuration. If not, the checks of config/ report why."""
    try:
        source_config(config)
    except ValueError:
        return False
    return True


def open_plugin_rows(config: DataConfig, *, offline: Offline | None = None) -> PluginRows:
    """Returns the rows of the plug-in that ``config`` names. Raises ValueError for a source that does not open."""
    key = msgspec.msgpack.encode((config.name, config.config), enc_hook=packed_text)
    if key not in _newest:
        found = source_config(config)
        try:
            source = find_data_source(config.name).open(found)
            len(source)  # an invalid length raises here
        except Exception as error:  # any exception of plug-in code is reported
            raise ValueError(f"data.name={config.name}: it does not open: {plugin_error_text(error)}") from error
        _newest.clear()
        _newest[key] = source
    return PluginRows(_newest[key], config, offline=offline)


class PluginRows:
    """Holds a plug-in's rows by number.

    Rows are checked like a file's rows, and have the keys "prompt" and "answer".
    """

    def __init__(self, source: BaseDataSource, config: DataConfig, *, offline: Offline | None = None) -> None:
        self._source, self._config, self._offline = source, config, offline

    def __len__(self) -> int:
        return len(self._source)

    def where(self, number: int) -> str:
        """Returns the origin of a row: the plug-in's name, and the origin that the plug-in returns for the row."""
        return f"{self._config.name}, {self._source.where(number)}"

    def __getitem__(self, number: int) -> DataRow:
        """Raises `BadRow` for an unusable row; if the plug-in raised, `BadRow` has the plug-in's message."""
        where = self.where(number)
        try:
            row = self._source[number]
        except BadRow:
            raise
        except Exception as error:  # any exception of plug-in code makes this row a bad row
            raise BadRow.because("source", f"{where}: {plugin_error_text(error)}") from error
        return self._checked(row, where)

    def modality(self, number: int) -> str:
        """Returns the modality of a row."""
        try:
            return modality_of_row(self[number])
        except BadRow as bad:
            return modality_of_row(bad)

    def held_out(self) -> HeldOutRows | None:
        """Returns the evaluation rows that the plug-in defines, or None if it defines no evaluation rows."""
        rows = self._source.held_out()
        if rows is None:
            return None
        return HeldOutRows(
            [(f"{self._config.name}, held-out row {place}", row) for place, row in enumerate(rows)], self
        )

    def digest(self) -> str:
        """Returns the xxh3-128, in hex, of the number of rows, up to `DIGESTED_ROWS` rows and the evaluation rows.

        Raises ValueError for a row with a value that cannot be encoded.
        """
        hasher = xxhash.xxh3_128(f"{len(self)} rows\n".encode())
        for number in range(0, len(self), max(1, -(-len(self) // DIGESTED_ROWS))):
            try:
                hasher.update(row_bytes(self[number], where=self.where(number)))
            except BadRow as error:
                hasher.update(f"{number} {error.reason}\n".encode())
        for row in self._source.held_out() or ():
            hasher.update(row_bytes(row, where=f"{self._config.name}, a held-out row"))
        return hasher.hexdigest()

    def _checked(self, row: DataRow, where: str) -> DataRow:
        return check_row(row, replace(row_keys(self._config, offline=self._offline), may_be_empty=True), where=where)


class HeldOutRows:
    """Holds the evaluation rows that a plug-in defines, by number. Each row is checked when it is read."""

    def __init__(self, rows: list[tuple[str, DataRow]], of: PluginRows) -> None:
        self._rows, self._of = rows, of

    def __len__(self) -> int:
        return len(self._rows)

    def where(self, number: int) -> str:
        """Returns the origin of an evaluation row."""
        return self._rows[number][0]

    def modality(self, number: int) -> str:
        """Returns the modality of an evaluation row."""
        return modality_of_row(self[number])

    def __getitem__(self, number: int) -> DataRow:
        where, row = self._rows[number]
        return self._of._checked(row, where)


def row_bytes(row: DataRow, *, where: str) -> bytes:
    """Returns a deterministic encoding of a row. Raises ValueError for values that cannot be encoded."""
    try:
        return msgspec.json.encode(row, order="deterministic")
    except TypeError as error:
        raise ValueError(f"{where}: {error}. A row holds text, numbers, lists and mappings.") from error
