"""Takes out of a text what must not leave the run: secrets, and what an exception may quote of a sample."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from relax_core.config.redaction import REDACTED, USER_INFO
from relax_core.contracts.shown_text import shown

MOST_CHARACTERS = 500
_SECRET_NAME = re.compile(r"token|secret|password|passwd|api_?key|credential|auth", re.IGNORECASE)
_SECRETS = (
    USER_INFO,
    re.compile(r"(?i)(?<=bearer )\S+"),
    re.compile(r"(?i)(?<=token=)[^\s&;,]+"),
    re.compile(r"(?i)(?:(?<=password=)|(?<=password: )|(?<=api_key=)|(?<=api-key: )|(?<=secret=))[^\s&;,]+"),
    re.compile(r"\b(?:rlx|sk|hf|ghp|xox[abp])[-_][A-Za-z0-9_-]{8,}"),
)
_ERROR_NAME = re.compile(r"\b[A-Z]\w*(?:Error|Exception|Warning|Timeout|Lost)\b(?=:)")
_SHORTEST = 6  # characters of a variable's value that may be a secret


def clean(text: str, *, environment: Mapping[str, str] = os.environ) -> str:
    """Returns a cause as it may be sent: without secrets, and up to the name of the first exception.

    What follows the name of an exception may quote a prompt or a response. Values of environment variables whose names
    say that they are secret are taken out wherever they stand.
    """
    error = _ERROR_NAME.search(text)
    if error is not None:
        text = f"{text[: error.end()]} (the run's logs say more)"
    for name, value in environment.items():
        if len(value) >= _SHORTEST and _SECRET_NAME.search(name):
            text = text.replace(value, REDACTED)
    for secret in _SECRETS:
        text = secret.sub(REDACTED, text)
    return shown(text)[:MOST_CHARACTERS]
