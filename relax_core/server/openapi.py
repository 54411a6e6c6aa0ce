"""Completes the OpenAPI schema of the gateway: refusals, the token, exclusive bodies, and links between routes."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from relax_core.server.gateway_settings import Limits
from relax_core.server.guard import OPEN
from relax_core.server.problems import Problem

ORDERS = ("scale_out", "scale_in")


def describe(app: FastAPI, limits: Limits) -> None:
    """Makes ``/openapi.json`` say what FastAPI does not see; malformed requests get 400 and not 422.

    The numbers of engines that a run with these ``limits`` takes are those of the schema, and so are the hosts of
    servers that it takes. A kind of target that it never takes is not in the schema.
    """
    schema = get_openapi(title=app.title, version="1", routes=app.routes)
    parts = schema.setdefault("components", {})
    schemas = parts.setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    schemas["Problem"] = Problem.model_json_schema()
    for name in ("ScaleOutTo", "ScaleInTo"):
        schemas[name]["properties"]["num_replicas"] |= {"minimum": limits.start, "maximum": limits.most}
    parts["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
    for path, methods in schema["paths"].items():
        for operation in methods.values():
            operation["responses"].pop("422", None)
            if path != OPEN:
                operation["security"] = [{"token": []}]
    for kind in ORDERS:
        _link(schema["paths"], kind)
    hosts = "|".join(re.escape(host) for host in limits.hosts)
    for name in ("ScaleOutBy", "ScaleInAt"):
        schemas[name]["properties"]["engine_urls"]["items"]["pattern"] = f"^http://({hosts}):[1-9][0-9]{{0,3}}/?$"
    for kind in ORDERS:
        body = schema["paths"][f"/rollout/{kind}"]["post"]["requestBody"]["content"]["application/json"]["schema"]
        kinds = body.pop("anyOf", None) or body.pop("oneOf")
        if limits.no_urls:
            kinds = kinds[:-1]  # by address
        elif kind == "scale_out" and limits.no_more:
            kinds = kinds[1:]
        body["oneOf"] = kinds
        body.pop("title", None)
    app.openapi = lambda: schema  # type: ignore[method-assign]


def _link(paths: dict[str, Any], kind: str) -> None:
    """Says that the id in an order's answer is the id that the other routes take."""
    for answer in ("200", "202"):
        paths[f"/rollout/{kind}"]["post"]["responses"][answer]["links"] = {
            f"{verb}_{kind}": {
                "operationId": f"{verb}_{kind}",
                "parameters": {"request_id": "$response.body#/request_id"},
            }
            for verb in ("get", "cancel")
        }
