"""Routed experts on their way from an engine's answer to the sample: read, split and joined."""

from __future__ import annotations

import base64
import binascii

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated


def read_routed_experts(text: str, *, prompt_tokens: int, response_tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """SGLang's meta_info.routed_experts, base64 of int32 [prompt + response - 1, layers, experts a token], as those of
    the prompt and of the response: both uint8, or both uint16 where a number needs it, and read-only.

    It tells no shape: both are ``[tokens, 1, layers x experts a token]``, and whoever knows the model cuts the last
    axis. Raises ValueError for what does not fit the tokens.
    """
    rows = prompt_tokens + response_tokens - 1
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), dtype="<i4")
    except (binascii.Error, ValueError) as error:
        raise ValueError(f"routed_experts is no base64 of int32 numbers: {error}") from error
    if numbers.size == 0 or numbers.size % rows or numbers.min() < 0 or numbers.max() > np.iinfo(np.uint16).max:
        raise ValueError(f"routed_experts has {numbers.size} numbers, which are no experts of {rows} tokens")
    narrow = np.uint8 if numbers.max() <= np.iinfo(np.uint8).max else np.uint16
    experts = read_only(numbers.astype(narrow).reshape(rows, 1, -1))
    return experts[:prompt_tokens], experts[prompt_tokens:]


def with_joined_experts(whole: Generated, before: Generated, after: Generated) -> Generated:
    """``whole``, which ``after`` made of ``before`` by going on behind its tokens, with the experts of both.

    Each token keeps those that it was fed through first: they belong to the log-probs that were sampled with. The rest
    get those that ``after`` found for them at the end of its prompt: ``before``'s last token, which had none yet, and
    all tokens whose engine told none (SGLang's abort of what it took from its cache).
    """
    if after.prompt_experts is None or after.response_experts is None:  # not asked for, or it never ran
        experts = before.prompt_experts, before.response_experts
    else:
        prefilled = after.prompt_experts  # the prompt and before's tokens
        known = [part for part in (before.prompt_experts, before.response_experts) if part is not None]
        rows = read_only(np.concatenate([*known, prefilled[sum(map(len, known)) :], after.response_experts]))
        prompt_tokens = len(prefilled) - len(before.output_ids)
        experts = rows[:prompt_tokens], rows[prompt_tokens:]
    return msgspec.structs.replace(whole, prompt_experts=experts[0], response_experts=experts[1])


def read_only(array: np.ndarray) -> np.ndarray:
    """The array itself, which nobody can write to any more."""
    array.flags.writeable = False
    return array
