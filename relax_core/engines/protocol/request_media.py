"""Sends the images and videos of prompts as digests, and compares how many prompt tokens an engine saw."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relax_core.contracts.engine import PromptRequest
from relax_core.contracts.media import Media


def media_fields(prompts: Sequence[Sequence[Media]]) -> dict[str, Any]:
    """Returns the field ``media`` of a /generate body: the (digest, first row) of the items of each prompt.

    Without any item the body has no such field, so that engines that know none take the request.
    """
    if not any(prompts):
        return {}
    return {"media": [[(one.item.digest, one.start) for one in media] for media in prompts]}


def checked_prompt_tokens(seen: int, prompt: PromptRequest) -> int:
    """Returns how many tokens of the prompt the engine saw, without the ``generated`` ones at its end; 0 if unknown.

    ``seen`` is the number of input tokens that the engine reports, 0 if it reports none. Raises ValueError if it
    differs from the number that was sent, because the trainer would then compute another prompt.
    """
    if seen and seen != len(prompt.input_ids):
        raise ValueError(
            f"prompt {prompt.rid}: the engine saw {seen} prompt tokens and the request has {len(prompt.input_ids)}; "
            "engine and trainer expand the prompt's images or videos differently"
        )
    return seen - prompt.generated if seen else 0
