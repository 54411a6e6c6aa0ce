"""Builds the replies of /generate: SGLang's JSON objects, and the compact frames of Relax's client."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from relax_core.engines.embedded.scheduler.calls import Call, Progress
from relax_core.engines.embedded.scheduler.token_scoring import ScoreItem, Scores
from relax_core.engines.protocol.frames import FLOAT32, INT32, Experts, Finished, Grown, StreamEnd


def finished(news: Progress, sent: set[int]) -> Finished:
    """Returns the compact frame of a finished sample.

    The experts of a prompt's tokens are sent with its first sample that has any. ``sent`` holds the indices of the
    prompts whose experts have been sent; the function adds this prompt's.
    """
    assert news.finish is not None
    sample = news.sample
    prompt_experts = response_experts = None
    prompt = sample.prompt
    if prompt.routes is not None and prompt.routes.experts is not None and news.routes is not None:
        response_experts = Experts.of(news.routes)
        if prompt.index not in sent:
            sent.add(prompt.index)
            prompt_experts = Experts.of(prompt.routes.experts)
    return Finished(
        rid=sample.prompt.rid,
        prompt=sample.prompt.index,
        sample=sample.index,
        output_ids=np.array(news.ids, dtype=INT32).tobytes(),
        logprobs=np.array(news.logprobs, dtype=FLOAT32).tobytes(),
        weight_versions=news.spans,
        finish_reason=news.finish,
        prompt_experts=prompt_experts,
        response_experts=response_experts,
        kept=news.kept,
        prompt_tokens=len(prompt.token_ids),
        prefill_ms=1e3 * prompt.prefill_s,
        cached_tokens=prompt.cached_tokens,
        queue_ms=1e3 * prompt.queue_s,
    )


def grown(news: Progress) -> Grown:
    """Returns the compact frame of new tokens of a sample that is not finished."""
    ids = np.array(news.ids, dtype=INT32)
    return Grown(news.sample.prompt.index, news.sample.index, news.length - len(ids), ids.tobytes())


def stream_end(call: Call) -> StreamEnd:
    """Returns the frame that ends a stream, with the call's times in milliseconds."""
    started = call.first_prefill or call.finished
    return StreamEnd(
        held_ms=1e3 * (started - call.submitted),
        prefill_ms=1e3 * call.prefill_s,
        decode_ms=1e3 * (call.finished - call.first_token) if call.first_token else 0.0,
        tower_passes=call.tower_passes,
        media_feature_bytes=call.media_feature_bytes,
    )


def sglang_reply(news: Progress, *, n: int, version: int, return_logprob: bool) -> dict[str, Any]:
    """Returns one response in SGLang's shape.

    ``index`` in the reply is the sample's index among all samples of the call, prompt by prompt. In a stream, tokens
    and log-probs are those since the sample's last event; counts and version spans are those of the whole response.
    """
    sample = news.sample
    prompt = sample.prompt
    spans = news.spans
    meta: dict[str, Any] = {
        "id": prompt.rid,
        "finish_reason": _finish_reason(news),
        "prompt_tokens": len(prompt.token_ids),
        "completion_tokens": news.length,
        "cached_tokens": prompt.cached_tokens,
        "weight_version": str(spans[-1].version if spans else version),
        "weight_versions": [{"version": str(span.version), "start": span.start, "end": span.end} for span in spans],
        "e2e_latency": time.perf_counter() - prompt.call.submitted,
    }
    if return_logprob:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(news.logprobs, news.ids, strict=True)
        ]
    if news.kept is not None:
        meta["output_token_sampling_mask"] = news.kept.lists()
        meta["output_token_sampling_logprobs"] = news.logprobs
    if prompt.routes is not None and prompt.routes.experts is not None and news.routes is not None:
        experts = np.concatenate([prompt.routes.experts, news.routes]).astype("<i4")
        meta["routed_experts"] = base64.b64encode(experts.tobytes()).decode()
    return {"text": "", "output_ids": news.ids, "meta_info": meta, "index": prompt.index * n + sample.index}


def score_reply(item: ScoreItem, scores: Scores, *, rid: str, version: int, latency_s: float) -> dict[str, Any]:
    """Returns scores in SGLang's shape: one entry for each token from ``item.start`` on; the first has no log-prob."""
    scored = item.token_ids[item.start + 1 :]
    meta: dict[str, Any] = {
        "id": rid,
        "finish_reason": {"type": "length", "length": 0},
        "prompt_tokens": len(item.token_ids),
        "completion_tokens": 0,
        "cached_tokens": 0,
        "weight_version": str(version),
        "weight_versions": [],
        "e2e_latency": latency_s,
        "output_token_logprobs": [],
        "input_token_logprobs": [
            [None, item.token_ids[item.start], None],
            *([logprob, token, None] for logprob, token in zip(scores.logprobs, scored, strict=True)),
        ],
    }
    if item.top_k:
        meta["input_top_logprobs"] = [
            None,
            *(
                [[logprob, token, None] for logprob, token in zip(values, ids, strict=True)]
                for values, ids in zip(scores.top_logprobs, scores.top_ids, strict=True)
            ),
        ]
    return {"text": "", "output_ids": [], "meta_info": meta}


def _finish_reason(news: Progress) -> dict[str, Any] | None:
    match news.finish:
        case None:
            return None
        case "stop":
            return {"type": "stop", "matched": news.matched}
        case "length":
            return {"type": "length", "length": news.length}
        case "abort":
            return {"type": "abort", "message": "Aborted"}
