"""Refuses HTTP requests with ``application/problem+json``: what is wrong, with key, value and fix."""

from __future__ import annotations

from dataclasses import dataclass
from http import HTTPStatus

PROBLEM = "application/problem+json"
TYPE = "urn:relax:problem:"  # the type of a problem is this and its name
STATUS_OF = {
    "malformed": 400,
    "unfit-address": 400,  # one of engine_urls
    "not-in-this-run": 400,  # the run's configuration takes no such order
    "too-few-engines": 400,
    "too-many-engines": 400,
    "no-token": 401,
    "no-origin": 403,  # of an order that a page gives
    "unknown-host": 403,
    "unknown-origin": 403,  # of another site's page
    "unknown-id": 404,
    "unknown-route": 404,
    "unknown-method": 405,
    "order-under-way": 409,
    "other-body": 409,  # of an Idempotency-Key
    "order-ended": 409,
    "no-autoscaler": 409,  # in a run that starts no engines
    "no-room": 409,  # for so many servers more
    "engine-of-the-start": 409,  # it stays
    "too-large": 413,
    "no-json": 415,
    "unreadable": 422,  # a file of a run, which the page cannot show
    "too-many-requests": 429,
    "busy": 503,  # with other questions of the page
    "no-report": 503,  # of what the run waits for
    "run-starts": 503,
    "run-ends": 503,
    "order-unwritten": 503,
    "too-many-connections": 503,
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Is the body of every refusal.

    ``type`` names what is wrong and is one of those in docs/elastic.md. ``key`` and ``value`` name the part of the
    request that is wrong, ``fix`` what to send instead, and ``request_id`` the order that is in the way; each is null
    where it says nothing.
    """

    type: str
    title: str
    status: int
    detail: str
    key: str | None = None
    value: str | None = None
    fix: str | None = None
    request_id: str | None = None


class Refusal(Exception):
    """Ends a request with the problem ``name`` of `STATUS_OF`. ``headers`` are further headers of the answer."""

    def __init__(self, name: str, detail: str, *, headers: dict[str, str] | None = None, **named: str | None) -> None:
        super().__init__(detail)
        self.status = STATUS_OF[name]
        self.headers = headers or {}
        title = HTTPStatus(self.status).phrase
        self.problem = Problem(type=TYPE + name, title=title, status=self.status, detail=detail, **named)
