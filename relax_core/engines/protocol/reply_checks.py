"""Checks what an engine answers, so that a malformed reply is that engine's failure and never an error of the caller.

The functions raise ValueError; the clients turn it into `relax_core.contracts.engine.MalformedReply`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.protocol.request_body import response_limit

T = TypeVar("T")
WORDS = 500  # most characters of a server's text in an error
MOST_NUMBER = np.iinfo(np.int32).max  # of a token id, and of a weight version
NEWS = 16  # most events or frames for each token that a call may return
# Log-probs are at most 0; sums in bfloat16 may be a little more.
MOST_LOGPROB = 1e-2
_SIGNS = 12  # most digits of a number that is read as a weight version

Natural = Annotated[int, msgspec.Meta(ge=0, le=1 << 62)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e15)]


class ModelInfo(msgspec.Struct):
    """Is what a client reads of /model_info."""

    weight_version: str | int


class Updated(msgspec.Struct):
    """Is what a client reads of the reply to a new weight version."""

    stall_ms: Seconds


class Load(msgspec.Struct):
    """Is what a client reads of one entry of /v1/loads."""

    num_running_reqs: Natural
    num_waiting_reqs: Natural
    running: Natural = 0
    queued: Natural = 0
    held: Natural = 0
    kv_cache_bytes: Natural = 0
    generated_tokens: Natural | None = None
    gen_throughput: Seconds | None = None
    token_usage: Seconds | None = None
    decode_times: list[tuple[Natural, Natural, Seconds, Seconds]] = []


class Loads(msgspec.Struct):
    """Is what a client reads of /v1/loads."""

    loads: Annotated[list[Load], msgspec.Meta(min_length=1)]


def decoded(data: bytes, kind: type[T]) -> T:
    """Returns a JSON text as ``kind``. Raises ValueError, also for one that is nested too deeply."""
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError:
        raise ValueError("JSON that is nested too deeply") from None


def reply_object(data: bytes, needs: type[msgspec.Struct] | None) -> dict[str, Any]:
    """Returns the JSON object of a reply, which has the fields of ``needs``. Raises ValueError.

    It is empty for no bytes, and for null, with which SGLang answers calls that return nothing.
    """
    reply = (decoded(data, dict[str, Any] | None) if data else None) or {}  # type: ignore[arg-type]
    if needs is not None:
        msgspec.convert(reply, needs)
    return reply


def version_number(version: str | int) -> int | None:
    """Returns a weight version as an integer from -1, which stands for none; None for another text."""
    text = str(version) if isinstance(version, str) or 0 <= abs(version) <= MOST_NUMBER else ""
    if len(text) > _SIGNS or not text.isascii() or not text.removeprefix("-").isdecimal():
        return None
    number = int(text)
    return number if -1 <= number <= MOST_NUMBER else None


def plain_words(text: str) -> str:
    """Returns the beginning of a server's text in one line, with signs that can be printed only."""
    return " ".join("".join(sign if sign.isprintable() else " " for sign in text[:WORDS]).split())


class ResponseCheck:
    """Checks the responses of one /generate, and the tokens that are told before a response is finished.

    ``vocab_size`` is the model's, None if it is not known. ``lowest_version`` is -1 for an engine that may have sampled
    without a weight version. The methods raise ValueError.
    """

    def __init__(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        vocab_size: int | None,
        lowest_version: int = 0,
    ) -> None:
        self._prompts = prompts
        self._limits = [response_limit(prompt, params) - prompt.generated for prompt in prompts]
        self._vocab_size = vocab_size
        self._end_of_ids = MOST_NUMBER if vocab_size is None else vocab_size
        self._lowest_version = lowest_version
        self.owed = {
            (index, sample)
            for index, prompt in enumerate(prompts)
            for sample in (range(params.n) if prompt.samples is None else prompt.samples)
        }
        self.expected = len(self.owed)
        limit = max(self._limits, default=0)
        self._news_left = NEWS * self.expected * (limit + 1)

    def news(self, parts: int) -> None:
        """Counts events or frames, because a server may send them without an end."""
        self._news_left -= parts
        if self._news_left < 0:
            raise ValueError("more parts than its tokens can have")

    def place(self, prompt: int, sample: int) -> None:
        """Checks that the response is one that was asked for and has not come yet."""
        if (prompt, sample) not in self.owed:
            raise ValueError(f"sample {sample} of prompt {prompt} was not asked for, or comes twice")

    def told(self, prompt: int, sample: int, start: int, ids: Sequence[int]) -> None:
        """Checks new tokens of a response that is not finished; ``start`` is the index of the first of them."""
        self.place(prompt, sample)
        if not 0 <= start <= start + len(ids) <= self._limits[prompt]:
            raise ValueError(f"tokens {start} to {start + len(ids)} of at most {self._limits[prompt]}")
        self._check_ids(np.asarray(ids, dtype=np.int64))

    def finished(self, one: Generated) -> None:
        """Checks a finished response."""
        self.place(one.prompt, one.sample)
        prompt, tokens = self._prompts[one.prompt], len(one.output_ids)
        if one.rid != prompt.rid:
            raise ValueError(f"prompt {one.prompt} has another rid")
        if tokens > self._limits[one.prompt]:
            raise ValueError(f"{tokens} tokens, and at most {self._limits[one.prompt]} were asked for")
        self._check_ids(one.output_ids)
        if len(one.logprobs) != tokens:
            raise ValueError(f"{len(one.logprobs)} log-probs came for {tokens} tokens")
        if tokens and not (np.isfinite(one.logprobs).all() and float(one.logprobs.max()) <= MOST_LOGPROB):
            raise ValueError("a log-prob is not finite, or is above 0")
        if tokens and int(one.versions.min()) < self._lowest_version:
            raise ValueError(f"weight version {int(one.versions.min())}")
        if one.kept is not None and self._vocab_size not in (None, one.kept.vocab_size):
            raise ValueError(f"kept sets of a vocabulary of {one.kept.vocab_size}")
        if one.kept is not None and (fault := one.kept.fault(one.output_ids)) is not None:
            raise ValueError(fault)
        self._check_experts(one, prompt_tokens=len(prompt.input_ids))
        check_times(one.prefill_ms, one.queue_ms)
        if not 0 <= one.cached_tokens <= MOST_NUMBER:
            raise ValueError(f"{one.cached_tokens} cached tokens")
        self.owed.discard((one.prompt, one.sample))

    def _check_ids(self, ids: np.ndarray) -> None:
        if ids.size and not 0 <= int(ids.min()) <= int(ids.max()) < self._end_of_ids:
            raise ValueError(f"token ids from {int(ids.min())} to {int(ids.max())}, which the vocabulary does not have")

    def _check_experts(self, one: Generated, *, prompt_tokens: int) -> None:
        response, prompt = one.response_experts, one.prompt_experts
        if response is None and prompt is None:
            return
        if response is None or prompt is None:
            raise ValueError("experts of the prompt or of the response are missing")
        rows = len(prompt), len(response)
        if rows != (prompt_tokens, max(0, len(one.output_ids) - 1)) or prompt.shape[1:] != response.shape[1:]:
            raise ValueError(f"experts {prompt.shape} and {response.shape}, which are not those of its tokens")


def check_times(*values: float) -> None:
    """Raises ValueError for a duration that is negative or not finite."""
    if not all(math.isfinite(value) and value >= 0.0 for value in values):
        raise ValueError("a duration is negative, or is no number")
