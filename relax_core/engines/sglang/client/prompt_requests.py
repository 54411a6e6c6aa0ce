"""Builds SGLang's /generate body for several prompts: one request for each sample, each with its own seed."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.engines.protocol.request_body import response_limit
from relax_core.engines.sglang.media.placed_items import placed_name

BAN = -1e30  # a logit whose probability is exactly 0 at every temperature, in float32 and bfloat16
_numbers = itertools.count()
# The ids that are sent for a prompt, and an entry of image_data for each of its images and videos.
MediaEntries = tuple[list[int], list[str]]


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """Holds one sample's request: the prompt's index, the sample from 0 to n - 1, and a rid that is used once."""

    prompt: int
    sample: int
    rid: str


def named_media(prompt: PromptRequest) -> MediaEntries:
    """Returns a prompt's ids and the names of its items, for a server of the run, which maps their files."""
    return prompt.input_ids, [placed_name(one) for one in prompt.media]


def image_data(entries: Sequence[list[str]]) -> dict[str, Any]:
    """Returns the field image_data of a body, which a body without images and videos does not have.

    ``entries`` has a list for each sample, an empty one for text alone.
    """
    return {"image_data": list(entries)} if any(entries) else {}


def sample_requests(prompts: Sequence[PromptRequest], *, n: int) -> list[SampleRequest]:
    """Returns one request for each sample that the prompts ask for."""
    return [
        SampleRequest(index, sample, f"{prompt.rid}/{sample}/{next(_numbers)}")
        for index, prompt in enumerate(prompts)
        for sample in (range(n) if prompt.samples is None else prompt.samples)
    ]


def sample_seed(prompt_seed: int, sample: int) -> int:
    """Returns the seed of one sample of a prompt, an integer of 63 bits.

    SGLang adds the token's position to it, so that a response that goes on after its own prefix goes on with its own
    random numbers.
    """
    digest = hashlib.blake2b(f"{prompt_seed}:{sample}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sglang_body(
    prompts: Sequence[PromptRequest],
    samples: Sequence[SampleRequest],
    params: SamplingParams,
    *,
    version: int,
    seeds: bool,
    media: Callable[[PromptRequest], MediaEntries] | None = None,
    tells_tokens: bool = False,
) -> dict[str, Any]:
    """Returns the JSON body of one /generate.

    ``version`` is the weight version in force; SGLang reuses a cached prefix only for requests with the same version.
    If sampling leaves tokens out, the body asks for the kept sets, with which SGLang returns the log-probs over these
    sets; its usual log-probs are over the whole vocabulary. ``media`` returns the ids that are sent for a prompt, and
    its entries of image_data; the default is `named_media`. ``tells_tokens``: an event comes for each new token.
    """
    sent = [(media or named_media)(prompt) for prompt in prompts]
    bans = {str(token): BAN for token in params.banned_token_ids}
    return {
        "rid": [one.rid for one in samples],
        "input_ids": [sent[one.prompt][0] for one in samples],
        "sampling_params": [
            _sampling(prompts[one.prompt], one.sample, params, bans, seeds=seeds)
            | ({"stream_interval": 1} if tells_tokens else {})
            for one in samples
        ],
        "return_logprob": True,
        "stream": True,
        "extra_key": f"weights-{version}",
        "return_sampling_mask": params.truncates,
        "return_routed_experts": params.return_routed_experts,
        **image_data([sent[one.prompt][1] for one in samples]),
    }


def _sampling(
    prompt: PromptRequest, sample: int, params: SamplingParams, bans: dict[str, float], *, seeds: bool
) -> dict[str, Any]:
    new_tokens = response_limit(prompt, params) - prompt.generated
    fields: dict[str, Any] = {
        "max_new_tokens": new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "stop_token_ids": params.stop_token_ids,
        "stream_interval": new_tokens,  # SGLang then sends events only for the first token and the end
    }
    if params.stop:
        fields["stop"] = params.stop
    if bans:
        fields["logit_bias"] = bans
    if seeds:
        fields["sampling_seed"] = sample_seed(prompt.sampling_seed, sample)
    return fields
