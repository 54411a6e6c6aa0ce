"""Reads, splits and joins the routed experts of an engine's answers."""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated


def read_routed_experts(text: str, *, prompt_tokens: int, response_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the experts of the prompt and of the response from SGLang's meta_info.routed_experts.

    ``text`` is base64 of int32 [prompt + response - 1, layers, experts a token]. Both results are read-only and uint8,
    or uint16 if a number needs it. The text has no shape, so that both are ``[tokens, 1, layers x experts a token]``;
    the caller that knows the model splits the last axis. Raises ValueError if the text does not fit the tokens.
    """
    tokens = prompt_tokens + response_tokens - 1
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed_experts is no base64 of int32 numbers: {error}") from error
    if numbers.size == 0 or numbers.size % tokens or numbers.min() < 0 or numbers.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"routed_experts has {numbers.size} numbers, which are no experts of {tokens} tokens")
    narrow = np.uint8 if numbers.max() <= np.iinfo(np.uint8).max else np.uint16
    experts = read_only(numbers.astype(narrow).reshape(tokens, 1, -1))
    return experts[:prompt_tokens], experts[prompt_tokens:]


def with_joined_experts(whole: Generated, before: Generated, after: Generated) -> Generated:
    """Returns ``whole``, the response joined from ``before`` and ``after``, with the experts of both.

    Each token keeps the experts of its first pass through the model, because they belong to the log-probs that were
    sampled. The other tokens get the experts that ``after`` has for them at the end of its prompt. These are the last
    token of ``before``, which had no experts yet, and tokens for which the engine returned none, as SGLang does if a
    request is aborted whose prompt came from its cache.
    """
    if after.prompt_experts is None or after.response_experts is None:  # not asked for, or ``after`` never ran
        experts = before.prompt_experts, before.response_experts
    else:
        prefilled = after.prompt_experts  # experts of the prompt and of the tokens of ``before``
        known = [part for part in (before.prompt_experts, before.response_experts) if part is not None]
        joined = read_only(np.concatenate([*known, prefilled[sum(map(len, known)) :], after.response_experts]))
        prompt_tokens = len(prefilled) - len(before.output_ids)
        experts = joined[:prompt_tokens], joined[prompt_tokens:]
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])


def read_only(array: np.ndarray) -> np.ndarray:
    """Makes the array read-only and returns it."""
    array.flags.writeable = False
    return array
