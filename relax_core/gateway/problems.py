"""Refuses HTTP requests with ``application/problem+json``: what is wrong, with key, value and fix."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

from fastapi.responses import JSONResponse
from pydantic import BaseModel

PROBLEM = "application/problem+json"


class Problem(BaseModel):
    """Is the body of every refusal.

    ``key`` and ``value`` name the part of the request that is wrong, ``fix`` what to send instead, and ``request_id``
    the order that is in the way; each is null where it says nothing.
    """

    type: str = "about:blank"
    title: str
    status: int
    detail: str
    key: str | None = None
    value: str | None = None
    fix: str | None = None
    request_id: str | None = None


class Refusal(Exception):
    """Ends a request with a problem. ``headers`` are further headers of the answer."""

    def __init__(self, status: int, detail: str, *, headers: dict[str, str] | None = None, **named: str | None) -> None:
        super().__init__(detail)
        self.status = status
        self.headers = headers or {}
        self._named = named

    def response(self) -> JSONResponse:
        """Returns the answer."""
        title = HTTPStatus(self.status).phrase
        problem = Problem.model_validate({**self._named, "title": title, "status": self.status, "detail": str(self)})
        return JSONResponse(problem.model_dump(), status_code=self.status, headers=self.headers, media_type=PROBLEM)


def responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """Returns what the schema says of the refusals of a route; each route has those of the first line."""
    every = (400, 401, 403, 429, 503)
    return {
        status: {"description": HTTPStatus(status).phrase, "content": {PROBLEM: {"schema": _SCHEMA}}}
        for status in (*every, *statuses)
    }


_SCHEMA = {"$ref": "#/components/schemas/Problem"}
