"""Answers a /generate request that scores given tokens, batch by batch in the decode thread between decode steps."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from relax_core.contracts.media import MediaGone
from relax_core.engines.embedded.http.replies import score_reply
from relax_core.engines.embedded.http.score_body import ScoreRequest
from relax_core.engines.embedded.model.prefill import like_lengths
from relax_core.engines.embedded.scheduler.scheduler import NOTHING_ATTESTED, Scheduler
from relax_core.engines.embedded.scheduler.token_sampler import NonFiniteLogits
from relax_core.engines.http_server import asgi
from relax_core.engines.http_server.asgi import HttpError, Receive, Send


async def answer_scores(request: ScoreRequest, scheduler: Scheduler, receive: Receive, send: Send) -> None:
    """Scores the request's tokens and answers with JSON.

    Raises HttpError 409 if the weights asked for are not in force, 500 if the weights yield logits that are not finite.
    """
    if scheduler.version == NOTHING_ATTESTED or scheduler.version < request.min_version:
        raise HttpError(
            409,
            f"min_version {request.min_version}: weights version {scheduler.version} is in force; requests for scores "
            "do not wait, so send the weights first",
        )
    began = time.perf_counter()
    disconnect = asyncio.create_task(_disconnected(receive))
    replies: list[dict[str, Any]] = [{}] * len(request.items)
    try:
        for batch in like_lengths([len(item.token_ids) for item in request.items]):
            if disconnect.done():
                return
            items = [request.items[index] for index in batch]
            version, scores = await asyncio.wrap_future(scheduler.score(items))
            for index, item, one in zip(batch, items, scores, strict=True):
                latency_s = time.perf_counter() - began
                rid = request.rids[index]
                replies[index] = score_reply(item, one, rid=rid, version=version, latency_s=latency_s)
    except MediaGone as error:
        raise HttpError(500, str(error)) from error
    except NonFiniteLogits as error:
        raise HttpError(500, f"weight version {scheduler.version}: {error}") from error
    finally:
        disconnect.cancel()
    await asgi.answer(send, replies[0] if request.single else replies)


async def _disconnected(receive: Receive) -> None:
    """Returns once the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
