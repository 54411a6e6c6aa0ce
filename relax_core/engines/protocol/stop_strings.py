"""Finds stop strings in token ids with the model's tokenizer, and the token that completes a stop string."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SPARE_TOKENS = 4  # additional tokens, because the decoded text may start inside a character
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"  # the decoder's output for an incomplete character
KNOWN_STOPS = 16  # maximum cached sets of stop strings; a run uses one set
MAX_STOP_STRINGS, MAX_STOP_BYTES = 16, 1024
_NO, _YES, _UNKNOWN = 0, 1, 2


def read_tokenizer(model_folder: Path) -> Tokenizer:
    """Reads the tokenizer of a Hugging Face folder. Raises ValueError for a folder without a tokenizer."""
    from tokenizers import Tokenizer

    file = model_folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{model_folder} has no tokenizer.json, which stop strings need")
    try:
        return Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises only this general type
        raise ValueError(f"{file} cannot be read: {error}") from error


class StopStrings:
    """Finds stop strings in token ids.

    Each token has at least one byte of text. A stop string at the end of a response is therefore within the last
    ``window`` tokens. Only these tokens are decoded.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        assert stop and all(stop)
        self.stop = tuple(stop)
        self._tokenizer = tokenizer
        self.window = max(len(string.encode()) for string in stop) + SPARE_TOKENS
        # A token completes a string only if its text has the string's last character, or incomplete characters.
        self._last = {string[-1] for string in stop}
        self._completes = np.full(tokenizer.get_vocab_size(with_added_tokens=True), _UNKNOWN, dtype=np.int8)

    def may_complete(self, tokens: np.ndarray) -> np.ndarray:
        """Returns the indices of the ``tokens`` that may complete a stop string. All other tokens cannot."""
        known = tokens < len(self._completes)
        answers = np.where(known, self._completes[np.where(known, tokens, 0)], _YES)
        for index in np.flatnonzero(answers == _UNKNOWN):
            answers[index] = self._completes[tokens[index]] = self._may_complete_one(int(tokens[index]))
        return np.flatnonzero(answers == _YES)

    def _may_complete_one(self, token: int) -> int:
        # Decoding a single token may drop a leading space. Therefore any token may complete a string that ends with a
        # space.
        text = self._text([token])
        found = REPLACEMENT in text or any(last in text or last.isspace() for last in self._last)
        return _YES if found else _NO

    def matched(self, ids: Sequence[int]) -> str | None:
        """Returns the stop string that the last of ``ids`` completes, or None.

        If the token completes several strings, returns the string that begins first.
        """
        text = self._text(ids[-self.window :])
        found = [(text.find(string), string) for string in self.stop if string in text]
        return min(found)[1] if found else None

    def end(self, ids: Sequence[int], *, checked: int = 0) -> int | None:
        """Returns the number of response tokens up to the first completed stop string, or None.

        The first ``checked`` tokens are known to complete no stop string.
        """
        if self._contains_any(ids[max(0, checked - self.window) :]):
            for count in range(checked + 1, len(ids) + 1):
                if self.matched(ids[:count]) is not None:
                    return count
        return None

    def _contains_any(self, ids: Sequence[int]) -> bool:
        text = self._text(ids)
        return any(string in text for string in self.stop)

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=False)


class StopTable:
    """Caches the `StopStrings` of an engine's requests. Reads the tokenizer at the first request with stop strings."""

    def __init__(self, model_folder: Path) -> None:
        self._model_folder = model_folder
        self._tokenizer: Tokenizer | None = None
        self._known: dict[tuple[str, ...], StopStrings] = {}
        self._lock = threading.Lock()  # several threads parse large bodies

    def of(self, stop: Sequence[str]) -> StopStrings | None:
        """Returns the `StopStrings` for ``stop``; None if ``stop`` is empty. Raises ValueError without a tokenizer."""
        if not stop:
            return None
        key = tuple(stop)
        with self._lock:
            if key not in self._known:
                if self._tokenizer is None:
                    self._tokenizer = read_tokenizer(self._model_folder)
                if len(self._known) >= KNOWN_STOPS:
                    self._known.pop(next(iter(self._known)))
                self._known[key] = StopStrings(self._tokenizer, key)
            return self._known[key]
