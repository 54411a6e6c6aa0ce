"""The contract of an inference engine: requests, responses and weight manifests, named as in SGLang's HTTP protocol."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort"]

# Engines and the configuration use these bounds. Temperature 0 is greedy. Logits divided by a temperature below
# `MIN_TEMPERATURE` may overflow float32, and SGLang treats it as 0. `MAX_TOP_K` is SGLang's value for all tokens.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
REQUEST_TIMEOUT_S = 600.0  # longest pause within a generate call
SYNC_TIMEOUT_S = 120.0  # longest weight update or other control call
KV_CACHE, WEIGHTS = "kv_cache", "weights"  # tags of the memory that an engine can release
SILENT_S = 2.0  # longest wait of a train step for one engine's weight update; then the engine's owner updates it later
MAX_BANNED = 16384  # most banned tokens of one request; each step of a batch masks all of them
MAX_TOP_K = 1 << 30


class EngineError(RuntimeError):
    """An engine refused or failed a call. The text names the engine, the route and the engine's message."""


class EngineUnreachable(EngineError):
    """The engine's process has exited or does not answer before the deadline."""


class MalformedReply(EngineUnreachable):
    """The engine's reply violates the protocol; the engine counts as lost, like an engine that does not answer."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the sampling parameters of a call.

    ``n`` is the number of responses for each prompt; response k uses seed ``(sampling_seed, k)``. ``temperature`` 0 is
    greedy. ``top_p`` 1, ``top_k`` -1 and ``min_p`` 0 switch truncation off; ``min_p`` keeps the tokens that have at
    least this share of the most likely token's probability. ``banned_token_ids`` are never sampled. Log-probs are of
    the sampling distribution, over the kept tokens. ``return_routed_experts``: the engine returns the experts to which
    each token was routed. ``stop`` lists strings; a response ends with the token that completes the first of them in
    its text. ``return_kept_tokens``: the engine returns the set from which each token was sampled.
    """

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop_token_ids: list[int] = []
    banned_token_ids: list[int] = []
    return_routed_experts: bool = False
    stop: list[str] = []
    return_kept_tokens: bool = False

    @property
    def truncates(self) -> bool:
        """Returns whether top_k, top_p or min_p excludes tokens; banned tokens do not count."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one prompt of a /generate call. The engine delays it until its weights are at least ``min_version``.

    ``samples`` lists the requested responses, 0..n-1; None means all. ``generated`` is the number of tokens at the end
    of ``input_ids`` that belong to a partial response. The response continues after them with the next random numbers;
    ``max_new_tokens`` includes them, and only new tokens are returned. ``rid`` identifies the prompt's group in an
    abort; several prompts of a call may share it. ``media`` places the prompt's items in ``input_ids``, in order; the
    engine gets digests and reads the tensors from its media folder. ``max_new_tokens``, if set, replaces the call's
    limit for this prompt.
    """

    rid: str
    input_ids: list[int]
    sampling_seed: int
    min_version: int = 0
    samples: list[int] | None = None
    generated: int = 0
    media: list[Media] = []
    max_new_tokens: int | None = None


class Generated(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Holds one finished response to prompt number ``prompt`` of the call; ``sample`` is 0..n-1 within the prompt.

    ``output_ids`` int32, ``logprobs`` float32 (natural logs) and ``versions`` int32 are ``[tokens]``: each token's id,
    its log-prob under the sampling distribution, and the weight version that sampled it. ``engine`` is the name of the
    engine in its pool, for the ledger.

    ``prompt_experts`` and ``response_experts``, uint8 or uint16 ``[tokens, MoE layers, experts per token]``, are the
    experts to which the prompt's and the response's tokens were routed; the response's last token has none, because it
    is never an input. An engine that returns no shape (SGLang) gives ``[tokens, 1, MoE layers x experts per token]``.
    ``kept`` has the set of tokens that each token was sampled from. Experts and kept sets are None unless the call
    asked for them.

    ``prompt_tokens`` is the number of the prompt's tokens in the engine, and ``prefill_ms`` the time of the prefills
    that included the prompt. ``cached_tokens`` is the number of prompt tokens that the engine did not compute, because
    they were in its prefix cache of the same weights. ``queue_ms`` is the time that the prompt waited in the engine for
    weights and for capacity. These are 0 if the engine does not report them.

    All arrays are read-only. A response equals only itself, because ``==`` of arrays gives no single answer.
    """

    rid: str
    prompt: int
    sample: int
    output_ids: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray
    finish_reason: FinishReason
    engine: str = ""
    prompt_experts: np.ndarray | None = None
    response_experts: np.ndarray | None = None
    kept: KeptTokens | None = None
    prompt_tokens: int = 0
    prefill_ms: float = 0.0
    cached_tokens: int = 0
    queue_ms: float = 0.0


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the location of one Hugging Face tensor in a published weight file.

    ``offset`` is counted from the file's first tensor byte; ``offset`` and ``nbytes`` are in bytes.
    """

    name: str
    dtype: str  # torch name without prefix: "float32", "bfloat16"
    shape: list[int]
    offset: int
    nbytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a published weight version: a safetensors file, its tensors, and a digest for each bucket of bytes.

    ``path`` is the file (in shared memory on one host). Its tensors begin at byte ``data_offset`` and take
    ``total_bytes``. Every bucket but the last has ``bucket_bytes``. ``digests`` has the xxh3_128 in hex of each bucket.
    ``digest`` is the xxh3_128 in hex over names, dtypes, shapes and ``digests``; a receiver must report the same digest
    before it may serve ``version``.

    ``frozen`` is the file of the tensors that are not trained, shared by all versions of a run; None if all tensors are
    in ``path``. ``digest`` covers its digest. A receiver that has these tensors need not read them again.
    """

    version: int
    path: str
    data_offset: int
    total_bytes: int
    bucket_bytes: int
    digests: list[str]
    digest: str
    tensors: list[TensorSpec]
    frozen: WeightManifest | None = None
