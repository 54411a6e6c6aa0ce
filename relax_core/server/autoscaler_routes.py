"""Declares the gateway's routes of the autoscaler: what it sees, what it has decided, and whether it is on."""

from __future__ import annotations

from typing import Annotated

from fastapi import FastAPI, Query

from relax_core.server.gateway_settings import Limits
from relax_core.server.json_bodies import (
    AutoscalerAnswer,
    AutoscalerSwitch,
    DecisionAnswer,
    DecisionList,
)
from relax_core.server.problems import Refusal, responses
from relax_core.server.scale_book import ScaleBook, ScaleDecision

Limit = Annotated[int, Query(ge=1, le=200)]
Offset = Annotated[int, Query(ge=0, le=1_000_000)]


def add_autoscaler(app: FastAPI, book: ScaleBook, limits: Limits) -> None:
    """Adds the routes of the autoscaler, whose decisions ``book`` holds, of a run with these ``limits``."""

    @app.get("/autoscaler/status")
    async def status() -> AutoscalerAnswer:
        """Says whether the autoscaler is on."""
        return AutoscalerAnswer(enabled=book.enabled())

    @app.get("/autoscaler/conditions", responses=responses(404))
    async def conditions() -> DecisionAnswer:
        """Returns what the autoscaler saw and decided last, also where it changed nothing."""
        last = book.last()
        if last is None:
            raise Refusal("unknown-id", "the autoscaler has decided nothing yet", fix="turn it on, and ask again")
        return _answer(last)

    @app.get("/autoscaler/scale_history")
    async def scale_history(limit: Limit = 50, offset: Offset = 0) -> DecisionList:
        """Returns the decisions that changed the number of engines, the newest first."""
        found = book.changes(limit=limit, offset=offset)
        return DecisionList(decisions=[_answer(one) for one in found], limit=limit, offset=offset)

    @app.post("/autoscaler/enable", responses=responses(409, 413, 415))
    async def enable(body: AutoscalerSwitch) -> AutoscalerAnswer:
        """Turns the autoscaler on or off; what it has ordered goes on."""
        if body.enabled and (why := limits.refusal or limits.no_more):
            raise Refusal("no-autoscaler", why, key="enabled", value="true")
        book.enable(body.enabled)
        return AutoscalerAnswer(enabled=body.enabled)


def _answer(decision: ScaleDecision) -> DecisionAnswer:
    return DecisionAnswer(
        at=decision.at,
        action=decision.action,
        reason=decision.reason,
        engines=decision.engines,
        target=decision.target,
        wait_share=decision.wait_share,
        waiting=decision.waiting,
        idle_share=decision.idle_share,
        cache_share=decision.cache_share,
        request_id=decision.order or None,
    )
