"""What the rollout asks of an inference engine, by the fields of SGLang's HTTP protocol that we use."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from relax_core.contracts.kept_tokens import KeptTokens

FinishReason = Literal["stop", "length", "abort"]
PauseMode = Literal["in_place", "retract", "abort"]

# What engines sample with, and what the configuration takes. A temperature of 0 is greedy; logits that are divided by
# one below the first bound may leave float32, and SGLang takes it for 0. `MAX_TOP_K` is SGLang's word for all tokens.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
MAX_TOP_K = 1 << 30


class EngineError(RuntimeError):
    """An engine refused or failed a call; the text names the engine, the route and its words."""


class EngineUnreachable(EngineError):
    """The engine's process is gone or does not answer before the deadline."""


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How to sample. ``n`` responses a prompt; response k of a prompt uses seed ``(sampling_seed, k)``.

    ``temperature`` 0 is greedy. ``top_p`` 1, ``top_k`` -1 and ``min_p`` 0 switch truncation off; ``min_p`` keeps the
    tokens that have at least this share of the most likely one's probability. ``banned_token_ids`` are never sampled.
    Log-probs are those of the distribution that was sampled from: over the tokens that were left.
    ``return_routed_experts``: of a mixture of experts, tell which experts each token was routed to.
    ``stop``: strings; a response ends with the token that completes the first of them in its text.
    ``return_kept_tokens``: tell from which tokens each one was sampled.
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
        """Whether tokens are left out before one is sampled, beside the banned ones."""
        return self.temperature > 0.0 and (self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0)


class PromptRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt of a /generate call. The engine holds it until its weights are at least ``min_version``.

    ``samples``: which of the ``n`` responses are asked for, 0..n-1; None for all. ``generated``: how many of the last
    ``input_ids`` are tokens of the response itself, which goes on behind them: its random numbers go on too, and the
    ``max_new_tokens`` count these tokens in. What comes back is the new tokens alone. ``rid`` names the prompt's group
    in an abort; several prompts of a call may share it.
    """

    rid: str
    input_ids: list[int]
    sampling_seed: int
    min_version: int = 0
    samples: list[int] | None = None
    generated: int = 0


class Generated(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One finished response. ``prompt`` is the place of its prompt in the call, ``sample`` is 0..n-1 within the prompt.

    ``output_ids`` int32, ``logprobs`` float32 (natural logs) and ``versions`` int32 are ``[tokens]``: each token's id,
    how likely it was under the distribution that it was sampled from, and the weight version that sampled it.
    ``engine`` names the engine of a pool that it came from, for the ledger.

    ``prompt_experts`` and ``response_experts``, uint8 or uint16 ``[tokens, MoE layers, experts a token]``, are what the
    prompt's tokens and those of the response were routed to; the response's last token is never fed, so that it has
    none. An engine that tells no shape (SGLang) gives ``[tokens, 1, MoE layers x experts a token]``. ``kept`` has the
    set of tokens that each token was sampled from. Experts and kept sets are None unless they are wanted.

    All arrays are read-only. A response equals only itself, since arrays have no single answer to ``==``.
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


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Where one Hugging Face tensor lies in a published weight file: ``offset`` from where its tensors begin, and
    ``nbytes``, in bytes."""

    name: str
    dtype: str  # torch name without prefix: "float32", "bfloat16"
    shape: list[int]
    offset: int
    nbytes: int


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """A published weight version: one safetensors file, its tensors, and a digest for each bucket of bytes.

    ``path`` is the file (in shared memory on one host), ``data_offset`` where its tensors begin, in bytes; they take
    ``total_bytes``. ``bucket_bytes``: every bucket but the last has this size. ``digests``: xxh3_128 hex of each
    bucket. ``digest``: xxh3_128 hex over names, dtypes, shapes and ``digests``: what a receiver must show to be
    admitted to serve ``version``.
    """

    version: int
    path: str
    data_offset: int
    total_bytes: int
    bucket_bytes: int
    digests: list[str]
    digest: str
    tensors: list[TensorSpec]
