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

    Each token keeps those that it was fed through first: they belong to the log-probs that were sampled with. The rest
    get those that ``after`` found for them at the end of its prompt: ``before``'s last token, which had none yet, and
    all tokens whose engine told none (SGLang's abort of what it took from its cache).
    """
    if after.prompt_experts is None or after.response_experts is None:  # not asked for, or it never ran
        experts = before.prompt_experts, before.response_experts
    else:
        prefilled = after.prompt_experts.array()  # the prompt and before's tokens
        known = [] if before.prompt_experts is None else [before.prompt_experts.array()]
        known += [] if before.response_experts is None else [before.response_experts.array()]
        rows = np.concatenate([*known, prefilled[sum(map(len, known)) :], after.response_experts.array()])
        prompt_tokens = len(prefilled) - len(before.output_ids)
        experts = RoutedExperts.of(rows[:prompt_tokens]), RoutedExperts.of(rows[prompt_tokens:])
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])
