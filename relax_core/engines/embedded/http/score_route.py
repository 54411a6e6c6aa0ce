"""Answers a /generate that scores given tokens: batch by batch in the decode thread, between two decode steps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from relax_core.engines.embedded.http import asgi
from relax_core.engines.embedded.http.asgi import HttpError, Receive, Send
from relax_core.engines.embedded.http.replies import score_reply
from relax_core.engines.embedded.http.score_body import ScoreRequest
from relax_core.engines.embedded.model.prefill import like_lengths
from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.scheduler.token_sampler import NonFiniteLogits


async def answer_scores(
    request: ScoreRequest, scheduler: Scheduler, receive: Receive, send: Send, *, msgpack: bool
) -> None:
    """Raises HttpError 409 for weights that are not in, 500 for weights that yield no numbers."""
    if scheduler.version == NOTHING_ATTESTED or scheduler.version < request.min_version:
        raise HttpError(
            409,
            f"min_version {request.min_version}: weights version {scheduler.version} is in; scores are never held "
            "back, so send the weights first",
        )
    began = time.perf_counter()
    gone = asyncio.create_task(_disconnected(receive))
    replies: list[dict[str, Any]] = [{}] * len(request.items)
    try:
        for batch in like_lengths([len(item.token_ids) for item in request.items]):
            if gone.done():
                return
            items = [request.items[place] for place in batch]
            version, scores = await asyncio.wrap_future(scheduler.score(items))
            for place, item, one in zip(batch, items, scores, strict=True):
                latency_s = time.perf_counter() - began
                rid = request.rids[place]
                replies[place] = score_reply(item, one, rid=rid, version=version, latency_s=latency_s)
    except NonFiniteLogits as error:
        raise HttpError(500, f"weight version {scheduler.version}: {error}") from error
    finally:
        gone.cancel()
    await asgi.answer(send, replies[0] if request.single else replies, msgpack=msgpack)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
