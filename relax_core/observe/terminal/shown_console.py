"""Prints coloured text and tables; hidden characters of the text itself are shown by their code."""

from __future__ import annotations

from collections.abc import Iterable
from typing import IO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from relax_core.contracts.shown_text import shown


class ShownConsole(Console):
    """Is rich's console for text of others: only its own colours and movements reach the terminal as they are.

    Every console of Relax is one, because `ShownStream` would show the codes of any other.
    """

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yields the segments of a renderable."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(shown(text), style)

    @property
    def file(self) -> IO[str]:
        """Is the stream without its filter: what `render` yields needs none."""
        found = super().file
        return getattr(found, "unfiltered", found)

    @file.setter
    def file(self, new_file: IO[str]) -> None:
        self._file = new_file
