"""Tells from the headers of a few rows' media how large those of a prompt are, and finds media that no key names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from relax_core.config.checks.modality_keys import MODELS_THAT, media_kinds
from relax_core.config.choices import TEXT, MediaPlace
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import DataRow
from relax_core.contracts.media import MEDIA_KINDS, MediaKind
from relax_core.data.eval_sets import too_many_bad
from relax_core.data.row_media import MediaColumns, unread_media
from relax_core.registry import find_env

if TYPE_CHECKING:
    from relax_core.data.media.media_headers import PlannedItem

FIRST_ROWS = 256  # data rows whose media are counted


class UnreadMedia:
    """Finds rows whose media no key of `data.media_keys` names, so that a model would be trained without them.

    A row counts if it has a column with media. If the model does not read their kind, or the env makes its prompts from
    the row by itself, its prompt must have a place for them, too. Rows with a place and no such column count if more
    than data.max_bad_rows of the rows are so; fewer are left out as bad rows. A column without a place only gets a note
    if a key names another column, because then the user chose what the model gets. Nothing counts with modality=text.
    """

    def __init__(self, config: RelaxConfig) -> None:
        self._kinds, self._data = media_kinds(config), config.data
        self._columns = MediaColumns(columns=config.data.media_keys.columns)
        env = find_env(config.env.name)
        self._makes_prompts = env.has_turns or env.agent is not None
        self._looks = config.modality.name != TEXT and config.data.task is None
        self._first: dict[tuple[MediaKind, bool], tuple[str, str | None, bool]] = {}  # by kind, and if it has a column
        self._places = dict.fromkeys(MEDIA_KINDS, 0)  # rows with a place and without a column
        self._noted: dict[MediaKind, tuple[str, str]] = {}
        self._looked = 0

    def look(self, row: DataRow, where: str, given: Callable[[], set[MediaKind]] = set) -> None:
        """Looks at a data row. ``given`` returns the kinds of media that its prompt has."""
        self._looked += 1
        found = unread_media(row, self._columns) if self._looks else {}
        for kind, (column, has_place) in found.items():
            asks = kind in self._kinds and not self._makes_prompts
            if (has_place or asks) and (column or asks) and kind not in given():
                if column and not has_place and self._columns.columns:
                    self._noted.setdefault(kind, (where, column))
                    continue
                self._first.setdefault((kind, column is not None), (where, column, has_place))
                self._places[kind] += column is None

    def notes(self) -> Iterator[str]:
        """Yields the columns with media that the model could read, if no key names them and no place is for them."""
        for kind, (where, column) in self._noted.items():
            first = "" if self._data.media_place else f" data.media_place={MediaPlace.first.value}"
            yield (
                f"{where}: column {column} has media of kind {kind}, and data.media_keys.{kind} is not set, so the "
                f"model does not get it. To train on it add data.media_keys.{kind}={column}{first}."
            )

    def refused(self, *, rows: int) -> str | None:
        """Returns why a run on ``rows`` rows like these cannot start, None if nothing counts."""
        most = self._data.max_bad_rows
        for (kind, in_column), (where, column, has_place) in self._first.items():
            if not in_column and not too_many_bad(self._places[kind], self._looked, rows=rows, most=most):
                continue
            has = f"{where}: it has media of kind {kind} in column {column}"
            if not in_column:
                has = f"{where}: its prompt has a place <{kind}>, and no column with media of this kind is found"
            if kind not in self._kinds:
                fix = f"Choose a model that {MODELS_THAT[kind]}; or modality={TEXT}, which trains on the text alone."
                return f"{has}, which the model does not read. {fix}"
            words = [f"data.media_keys.{kind}={column or 'COLUMN'}"]
            if not has_place and self._data.media_place is None:
                words.append(f"data.media_place={MediaPlace.first.value}")
            return (
                f"{has}, and data.media_keys.{kind} is not set, so the model would not get it. Add {' '.join(words)}; "
                f"or modality={TEXT}, which trains on the text alone."
            )
        return None


@dataclass(frozen=True, kw_only=True)
class PromptMedia:
    """Describes the media of the first ``prompts`` rows that can be used.

    ``items``, ``rows`` of the language model, ``patches`` of the vision tower, ``audio_frames`` of the audio tower and
    ``nbytes`` of tensors are means over these prompts; ``most_rows``, ``most_patches``, ``most_audio_frames`` and
    ``most_bytes`` are those of the prompt that has most, and
    ``item_patches`` those of the largest item. ``source_pixels`` is the largest size of an image or a frame before its
    resize. ``videos`` and ``sounds`` say whether there are any, because videos need the tokenizer and sounds more
    memory. ``prompts`` is 0 if the figures are what the limits allow because there are no rows yet.
    """

    prompts: int
    items: float
    rows: float
    patches: float
    nbytes: float
    most_rows: int
    most_patches: int
    most_bytes: int
    item_patches: int
    source_pixels: int
    videos: bool
    sounds: bool = False
    audio_frames: float = 0.0
    most_audio_frames: int = 0


def summed_up(prompts: Sequence[Sequence[PlannedItem]]) -> PromptMedia | None:
    """Returns the description of some prompts, None if there is no prompt."""
    if not prompts:
        return None
    items = [one for prompt in prompts for one in prompt]
    return PromptMedia(
        prompts=len(prompts),
        items=len(items) / len(prompts),
        rows=sum(one.rows for one in items) / len(prompts),
        patches=sum(one.patches for one in items) / len(prompts),
        nbytes=sum(one.nbytes for one in items) / len(prompts),
        most_rows=max(sum(one.rows for one in prompt) for prompt in prompts),
        most_patches=max(sum(one.patches for one in prompt) for prompt in prompts),
        most_bytes=max(sum(one.nbytes for one in prompt) for prompt in prompts),
        item_patches=max((one.patches for one in items), default=0),
        source_pixels=max((one.source_pixels for one in items), default=0),
        videos=any(one.kind == "video" for one in items),
        sounds=any(one.audio_frames for one in items),
        audio_frames=sum(one.audio_frames for one in items) / len(prompts),
        most_audio_frames=max(sum(one.audio_frames for one in prompt) for prompt in prompts),
    )
