"""The contract of an inference engine: requests, responses and weight manifests.

Names are from SGLang's HTTP protocol.
"""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.media import Media

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort"]

# Engines and the configuration use these bounds. Temperature 0 means greedy sampling. Logits divided by a temperature
# below `MIN_TEMPERATURE` may overflow float32, and SGLang treats it as 0. `MAX_TOP_K` is SGLang's value for all tokens.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
REQUEST_TIMEOUT_S = 600.0  # longest pause within a generate call
SYNC_TIMEOUT_S = 120.0  # longest weight update or other control call
KV_CACHE, WEIGHTS = "kv_cache", "weights"  # tags of the memory that an engine can release
SILENT_S = 2.0  # longest wait of a train step for one engine's weight update; then the engine's owner updates it later
MAX_BANNED = 16384  # most banned tokens of one request; each step of a batch masks all of them
MAX_TOP_K = 1 << 30


class EngineError(RuntimeError):
    """An engine refused a call or failed during a call. The text has the engine's name, the route and the message."""


class EngineUnreachable(EngineError):
    """The engine's process has exited or does not answer before the deadline."""


class MalformedReply(EngineUnreachable):
    """The engine's reply does not follow the protocol.

    Relax treats such an engine as lost, like an engine that does not answer.
    """


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the sampling parameters of a call.

    ``n`` is the number of responses for each prompt; response k uses seed ``(sampling_seed, k)``. ``temperature`` 0
    means greedy sampling. ``top_p`` 1, ``top_k`` -1 and ``min_p`` 0 switch truncation off. ``min_p`` keeps a token if
    its probability is at least ``min_p`` times the probability of the most likely token. ``banned_token_ids`` are never
    sampled. Log-probs are computed from the sampling distribution over the kept tokens. ``return_routed_experts``: the
    engine returns the experts that processed each token. ``stop`` lists strings; a response ends with the token that
    completes a stop string in its text. ``return_kept_tokens``: the engine returns the kept set of each sampled token.
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
        """Returns whether top_k, top_p or min_p may exclude tokens, regardless of banned tokens."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Holds one prompt of a /generate call. The engine starts it once its weight version is at least ``min_version``.

    ``samples`` lists the requested responses, 0..n-1; None means all. ``generated`` is the number of tokens at the end
    of ``input_ids`` that belong to a partial response. The engine continues the response after these tokens with the
    next random numbers and returns only new tokens; ``max_new_tokens`` includes the partial response. ``rid``
    identifies the prompt's group in an abort; several prompts of a call may have the same ``rid``. ``media`` lists the
    prompt's items and their positions in ``input_ids``, in order; the engine gets digests and reads the tensors from
    its media folder. ``max_new_tokens``, if set, replaces the call's limit for this prompt.
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
    """Holds one finished response to the prompt with index ``prompt`` in the call; ``sample`` is its index 0..n-1.

    ``output_ids`` int32, ``logprobs`` float32 (natural logs) and ``versions`` int32 are ``[tokens]``: each token's id,
    its log-prob under the sampling distribution, and the weight version that sampled it. ``engine`` is the name of the
    engine in its pool, for the ledger.

    ``prompt_experts`` and ``response_experts``, uint8 or uint16 ``[tokens, MoE layers, experts per token]``, are the
    experts that processed the tokens of the prompt and of the response. The response's last token has no experts,
    because it is never an input. For an engine that returns no shape (SGLang), the shape is ``[tokens, 1, MoE layers x
    experts per token]``. ``kept`` has the kept set of each sampled token. Experts and kept sets are None unless the
    call requested them.

    ``prompt_tokens`` is the prompt's number of tokens in the engine, and ``prefill_ms`` the duration of the prefills
    that included the prompt. ``cached_tokens`` is the number of prompt tokens that the engine found in its prefix cache
    (of the same weights) and did not compute. ``queue_ms`` is the time that the prompt waited in the engine for weights
    and for capacity. These four fields are 0 if the engine does not report them.

    All arrays are read-only. A response equals only itself, because ``==`` of arrays returns an array, not a bool.
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
    """Describes where a published weight file stores one Hugging Face tensor.

    ``offset`` is the distance from the file's first tensor byte; ``offset`` and ``nbytes`` are in bytes.
    """

    name: str
    dtype: str  # torch name without prefix: "float32", "bfloat16"
    shape: list[int]
    offset: int
    nbytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """Describes a published weight version: a safetensors file, its tensors, and a digest of each bucket.

    ``path`` is the file (in shared memory if all processes run on one host). Its tensors begin at byte ``data_offset``
    and have ``total_bytes`` bytes. A bucket is a range of ``bucket_bytes`` of these bytes; the last may be shorter.
    ``digests`` has the xxh3_128 of each bucket, in hex. ``digest`` is the xxh3_128 over names, dtypes, shapes and
    ``digests``, in hex. An engine may serve ``version`` only after it has reported the same digest.

    ``frozen`` describes the file with the tensors that are not trained; all versions of a run share it. It is None if
    all tensors are in ``path``. ``digest`` includes the digest of ``frozen``. An engine reads the frozen tensors only
    once.

    ``factors`` maps the name of each tensor with LoRA factors to the scale of their product. The tensor itself is one
    of ``frozen``, and its factors are in ``path``. ``digest`` includes ``factors``. A reader computes the sum.
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
    factors: dict[str, float] = {}

    @property
    def kept(self) -> frozenset[str]:
        """Returns the names of the tensors that versions with the same `kept_key` have in common."""
        frozen = [] if self.frozen is None else self.frozen.tensors
        return frozenset(spec.name for spec in frozen) - self.factors.keys()

    @property
    def kept_key(self) -> str:
        """Returns the digest of the frozen tensors and the names of the tensors with factors.

        A model that has the tensors `kept` of one version may keep them for another version if the keys are equal.
        """
        return "" if self.frozen is None else " ".join([self.frozen.digest, *sorted(self.factors)])
