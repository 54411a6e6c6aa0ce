"""Routed experts on their way from an engine's answer to the sample: read, split and joined."""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated
from relax_core.contracts.sample import RoutedExperts


def read_routed_experts(text: str, *, prompt_tokens: int, response_tokens: int) -> tuple[RoutedExperts, RoutedExperts]:
    """SGLang's meta_info.routed_experts, base64 of int32 [prompt + response - 1, layers, experts a token], as those of
    the prompt and of the response.

    It tells no shape: layers and experts stay one axis, which whoever knows the model cuts. Raises ValueError for what
    does not fit the tokens.
    """
    rows = prompt_tokens + response_tokens - 1
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed_experts is no base64 of int32 numbers: {error}") from error
    if numbers.size == 0 or numbers.size % rows or numbers.min() < 0 or numbers.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"routed_experts has {numbers.size} numbers, which are no experts of {rows} tokens")
    experts = numbers.reshape(rows, 1, -1)
    return RoutedExperts.of(experts[:prompt_tokens]), RoutedExperts.of(experts[prompt_tokens:])


def with_joined_experts(whole: Generated, before: Generated, after: Generated) -> Generated:
    """``whole``, which ``after`` made of ``before`` by going on behind its tokens, with the experts of both.

    Each token keeps those that it was fed through first: they belong to the log-probs that were sampled with. Only
    ``before``'s last token had none yet, and gets those that ``after`` found for it as the last of its prompt.
    """
    if after.prompt_experts is None or after.response_experts is None:  # not asked for, or it never ran
        experts = before.prompt_experts, before.response_experts
    elif before.prompt_experts is None or before.response_experts is None:
        experts = after.prompt_experts, after.response_experts
    else:
        last = RoutedExperts.of(after.prompt_experts.array()[-1:])
        response = RoutedExperts.joined([before.response_experts, last, after.response_experts])
        experts = before.prompt_experts, response
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])
