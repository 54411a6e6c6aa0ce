"""Makes the JSON body of a /generate call, with media as digests, and compares what the engine saw of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.media import Media

# Gets new tokens of a response as soon as they are sampled: index of the prompt, sample, index of the first of them in
# the response, their ids. A response that an engine begins anew is told anew, from its first token on.
OnTokens = Callable[[int, int, int, Sequence[int]], None]


def response_limit(prompt: PromptRequest, params: SamplingParams) -> int:
    """Returns the limit of sampled tokens of each response, those that were generated before included."""
    return params.max_new_tokens if prompt.max_new_tokens is None else prompt.max_new_tokens


def generate_body(
    prompts: Sequence[PromptRequest], params: SamplingParams, *, tells_tokens: bool = False
) -> dict[str, Any]:
    """Returns the JSON body of one /generate for all prompts.

    ``tells_tokens``: new tokens come while they are sampled.
    """
    sampling: dict[str, Any] = {
        "n": params.n,
        "max_new_tokens": params.max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
    }
    if params.stop:
        sampling["stop"] = params.stop
    if tells_tokens:
        sampling["stream_interval"] = 1
    body = {
        "rid": [prompt.rid for prompt in prompts],
        "input_ids": [prompt.input_ids for prompt in prompts],
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": True,
        "min_version": [prompt.min_version for prompt in prompts],
        "sampling_seed": [prompt.sampling_seed for prompt in prompts],
        "banned_token_ids": params.banned_token_ids,
        "return_routed_experts": params.return_routed_experts,
        "return_sampling_mask": params.return_kept_tokens,
    }
    if any(prompt.samples is not None for prompt in prompts):
        body["samples"] = [prompt.samples for prompt in prompts]
    if any(prompt.generated for prompt in prompts):
        body["generated"] = [prompt.generated for prompt in prompts]
    if any(prompt.generated or prompt.max_new_tokens is not None for prompt in prompts):
        body["sampling_params"] = [
            sampling | {"max_new_tokens": response_limit(prompt, params) - prompt.generated} for prompt in prompts
        ]
    return body | media_fields([prompt.media for prompt in prompts])


def media_fields(prompts: Sequence[Sequence[Media]]) -> dict[str, Any]:
    """Returns the field ``media`` of a /generate body: the (digest, first row) of the items of each prompt.

    Without any item the body has no such field, so that engines that know none take the request.
    """
    if not any(prompts):
        return {}
    return {"media": [[(one.item.digest, one.start) for one in media] for media in prompts]}


class OtherPrompt(ValueError):
    """Says that the engine expands the prompt's images or videos to another number of tokens, each time anew."""


def checked_prompt_tokens(seen: int, prompt: PromptRequest) -> int:
    """Returns how many tokens of the prompt the engine saw, without the ``generated`` ones at its end; 0 if unknown.

    ``seen`` is the number of input tokens that the engine reports, 0 if it reports none. Raises ValueError if it
    differs from the number that was sent, because the trainer would then compute another prompt; it is `OtherPrompt` if
    the prompt has media.
    """
    if seen and seen != len(prompt.input_ids):
        kind = OtherPrompt if prompt.media else ValueError
        raise kind(
            f"prompt {prompt.rid}: the engine saw {seen} prompt tokens and the request has {len(prompt.input_ids)}; "
            "engine and trainer expand the prompt's images or videos differently"
        )
    return seen - prompt.generated if seen else 0


def unknown_token(index: int, token_ids: Sequence[int], *, rid: str | None, vocab_size: int) -> str | None:
    """Returns an error text for the first unknown token of the request's prompt ``index``, or None if all are known.

    ``rid`` is the prompt's rid, if it has one.
    """
    if not token_ids or 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return None
    position = next(position for position, token in enumerate(token_ids) if not 0 <= token < vocab_size)
    name = f"input_ids[{index}]" if rid is None else f"input_ids[{index}] of rid {rid}"
    return (
        f"{name}: token id {token_ids[position]} at position {position} is not in the vocabulary; ids go from 0 to "
        f"{vocab_size - 1}"
    )
