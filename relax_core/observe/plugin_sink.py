"""Adapts a metrics sink of a plug-in to the metrics service."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from relax_core.contracts.sink import BaseSink, Record, SinkStart
from relax_core.registry import find_sink, short_name


class PluginSink:
    """Is a sink of a plug-in, imported and opened in the sink's own thread with the first batch.

    A library may wait for a network there, and a file that is missing when the metrics service restarts costs only this
    sink. It is not ``local``: no checkpoint waits for it.
    """

    local = False

    def __init__(self, name: str, values: Mapping[str, Any], start: SinkStart) -> None:
        """Takes the plug-in's name or path, and its configuration as the user gave it."""
        self.name = short_name(name)
        self._plugin, self._values, self._start = name, values, start
        self._sink: BaseSink | None = None

    def write(self, batch: Sequence[Record]) -> None:
        """Raises whatever the plug-in raises; a sink that could not be opened is opened with the next batch."""
        if self._sink is None:
            from relax_core.config.plugin_types import (
                plugin_config,  # OmegaConf, which a run without such sinks needs not
            )

            config = plugin_config("sink", self._plugin, self._values, section=f"tracker.sinks.{self.name}")
            spec = find_sink(self._plugin)
            if spec.isolated:
                from relax_core.observe.trackers.sink_process import ProcessSink

                self._sink = ProcessSink(self.name, self._plugin, self._values, self._start)
            else:
                self._sink = spec.open(self._start, config)
        self._sink.write(batch)

    def flush(self) -> None:
        """Flushes the plug-in's sink if it is open."""
        if self._sink is not None:
            self._sink.flush()

    def close(self) -> None:
        """Closes the plug-in's sink if it is open."""
        if self._sink is not None:
            self._sink.close()
