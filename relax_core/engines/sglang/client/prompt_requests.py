"""A prompt batch of prompts as SGLang wants it: one request a sample, each with a seed of its own."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.engine import PromptRequest, SamplingParams

BAN = -1e30  # a logit so low that its probability is exactly 0 at every temperature, in float32 and bfloat16
_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """``prompt``: its place in the prompt batch; ``sample``: 0..n-1; ``rid``: never used twice, as SGLang asks."""

    prompt: int
    sample: int
    rid: str


def sample_requests(prompts: Sequence[PromptRequest], *, n: int) -> list[SampleRequest]:
    return [
        SampleRequest(place, sample, f"{prompt.rid}/{sample}/{next(_numbers)}")
        for place, prompt in enumerate(prompts)
        for sample in (range(n) if prompt.samples is None else prompt.samples)
    ]


def sample_seed(prompt_seed: int, sample: int) -> int:
    """63 bits of sample ``sample`` of a prompt. SGLang adds the token's position, so that a response which goes on
    behind its own prefix goes on with its own random numbers."""
    digest = hashlib.blake2b(f"{prompt_seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sglang_body(
    prompts: Sequence[PromptRequest],
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    version: int,
    seeds: bool,
) -> dict[str, Any]:
    """The JSON body of one /generate. ``version``: the weights that are in force now; a prefix that others have
    computed is used again only under the same ones.

    Where tokens are left out the log-probs are asked for as those of the tokens that were left, and with them comes
    which these were; SGLang's usual log-probs are of all.
    """
    bans = {str(token): BAN for token in params.banned_token_ids}
    return {
        "rid": [one.rid for one in samples],
        "input_ids": [prompts[one.prompt].input_ids for one in samples],
        "sampling_params": [_sampling(prompts[one.prompt], one.sample, params, bans, seeds=seeds) for one in samples],
        "return_logprob": True,
        "stream": True,
        "extra_key": f"weights-{version}",
        "return_sampling_mask": params.truncates,
        "return_routed_experts": params.return_routed_experts,
    }


def _sampling(
    prompt: PromptRequest, sample: int, params: SamplingParams, bans: dict[str, float], *, seeds: bool
) -> dict[str, Any]:
    new_tokens = params.max_new_tokens - prompt.generated
    fields: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
        "stream_interval": new_tokens,  # events: the first token, and the end
    }
    if params.stop:
        fields["stop"] = params.stop
    if bans:
        fields["logit_bias"] = bans
    if seeds:
        fields["sampling_seed"] = sample_seed(prompt.sampling_seed, sample)
    return fields
