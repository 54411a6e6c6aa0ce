"""Strings that end a response: which of its tokens completes one, by the model's own tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPARE_TOKENS = 4  # beside those that a stop string can have: the first one's text may be cut where the window begins
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # what is shown for bytes that are no whole character yet
KNOWN_STOPS = 16  # sets of strings that are kept; a run asks for one
MOST_STOPS, MOST_STOP_BYTES = 16, 1024
_NO, _YES, _UNKNOWN = 0, 1, 2


def read_tokenizer(model_folder: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder. Raises ValueError for a folder without one."""
    from tokenizers import Tokenizer

    file = model_folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{model_folder} has no tokenizer.json, by which stop strings are found")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"{file} cannot be read: {error}") from error


class StopStrings:
    """Finds them in token ids. A token has a byte of text at least, so that the tokens at the end which may hold a stop
    string are few, ``window`` at most: only these are made text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        assert stop and all(stop)
        self.stop = tuple(stop)
        self._tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in stop) + SPARE_TOKENS
        # A string is completed by a token whose text has its last character, or bytes of one.
        self._last = {string[-1] for string in stop}
        self._completes = np.full(tokenizer.get_vocab_size(with_added_tokens=True), _UNKNOWN, dtype=np.int8)

    def may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Places of the tokens (one sample's newest each) that may complete a string; of the others none does."""
        known = tokens < len(self._completes)
        answers = np.where(known, self._completes[np.where(known, tokens, 0)], _YES)
        for place in np.flatnonzero(answers == _UNKNOWN):
            answers[place] = self._completes[tokens[place]] = self._look(int(tokens[place]))
        return np.flatnonzero(answers == _YES)

    def _look(self, token: int) -> int:
        # By itself a token may lose a space at its start, so that a string that ends with one is looked for always.
        text = self._text([token])
        found = REPLACEMENT in text or any(last in text or last.isspace() for last in self._last)
        return _YES if found else _NO

    def matched(self, ids: Sequence[int]) -> str | None:
        """The string that the last of these tokens of a response completes, None where it completes none. Of several it
        is the one that begins first."""
        text = self._text(ids[-self.window :])
        found = [(text.find(string), string) for string in self.stop if string in text]
        return min(found)[1] if found else None

    def end(self, ids: Sequence[int], *, checked: int = 0) -> int | None:
        """How many of a response's tokens there are when the first string is complete; None where none is. The first
        ``checked`` of them complete none."""
        if self.matched_anywhere(ids[max(0, checked - self.window) :]):
            for count in range(checked + 1, len(ids) + 1):
                if self.matched(ids[:count]) is not None:
                    return count
        return None

    def matched_anywhere(self, ids: Sequence[int]) -> bool:
        text = self._text(ids)
        return any(string in text for string in self.stop)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class StopTable:
    """The stop strings that requests to one engine have; the tokenizer is read when the first of them comes."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder
        self._tokenizer: Tokenizer | None = None
        self._known: dict[tuple[str, ...], StopStrings] = {}

    def of(self, stop: Sequence[str]) -> StopStrings | None:
        """None for no string. Raises ValueError where the model has no tokenizer."""
        if not stop:
            return None
        key = tuple(stop)
        if key not in self._known:
            if self._tokenizer is None:
                self._tokenizer = read_tokenizer(self._model_folder)
            if len(self._known) >= KNOWN_STOPS:
                self._known.pop(next(iter(self._known)))
            self._known[key] = StopStrings(self._tokenizer, key)
        return self._known[key]
