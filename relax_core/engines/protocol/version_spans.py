"""Turns the weight-version spans of an engine's answer into one weight version for each token."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

_INT32 = np.dtype("<i4")
_INT32_MAX = np.iinfo(_INT32).max


class VersionSpan(msgspec.Struct, frozen=True, array_like=True):
    """Says that weight version ``version`` generated the tokens ``[start, end)`` of a response."""

    start: int
    end: int
    version: int


def token_versions(spans: Sequence[VersionSpan], *, tokens: int) -> np.ndarray:
    """Returns the weight version of each token, read-only int32 ``[tokens]``.

    A span may be empty: SGLang sends one if a version computed the prompt and no token. Raises ValueError if the spans
    leave a token out or name one twice.
    """
    end, parts = 0, []
    for span in spans:
        if not span.start == end <= span.end <= tokens:
            break
        end = span.end
        if not -1 <= span.version <= _INT32_MAX:
            raise ValueError(f"weight version {span.version}")
        parts.append(span.version.to_bytes(4, "little", signed=True) * (end - span.start))
    if end != tokens or len(parts) != len(spans):
        found = [(span.start, span.end) for span in spans]
        raise ValueError(f"weight_versions name the tokens {found}, but the response has {tokens} tokens")
    return np.frombuffer(b"".join(parts), dtype=_INT32)
