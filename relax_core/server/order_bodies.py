"""Declares the JSON bodies that the routes of orders take. Types are strict: 0 is no false, and "1" is no 1."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag

from relax_core.server.orders import State

MOST_SECONDS = 86400.0


def _whole(value: object) -> object:
    """Returns a number without a fraction as an integer, as JSON Schema reads it: 2.0 is 2."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Replicas = Annotated[int, BeforeValidator(_whole), Field(ge=1, le=1_000_000)]
Seconds = Annotated[float, Field(gt=0, le=MOST_SECONDS, allow_inf_nan=False)]
EngineUrls = Annotated[list[Annotated[str, Field(min_length=1, max_length=200)]], Field(min_length=1, max_length=64)]
EngineIds = Annotated[list[Annotated[str, Field(pattern=r"^engine-[0-9]{1,9}$")]], Field(min_length=1, max_length=64)]


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    dry_run: bool = False


class _Out(_Body):
    """Adds engines. ``partial`` says what happens to the others if one of the new engines fails."""

    model_name: Literal["default"] = "default"
    timeout_secs: Seconds = 600.0
    partial: Literal["rollback_all", "keep_partial"] = "rollback_all"


class _In(_Body):
    """Takes engines out.

    With ``force`` samples under way are moved to other engines at once, and otherwise after ``timeout_secs`` seconds,
    by default engine.elastic.drain_timeout_s.
    """

    force: bool = False
    timeout_secs: Seconds | None = None


class ScaleOutTo(_Out):
    """Asks for so many engines in all, those of the start included."""

    num_replicas: Replicas


class ScaleOutBy(_Out):
    """Asks servers of somebody else, named by ``http://HOST:PORT``, to join. Those that are in are left out."""

    engine_urls: EngineUrls


class ScaleInTo(_In):
    """Asks for so few engines in all, those of the start included; the newest ones go."""

    num_replicas: Replicas


class ScaleInOf(_In):
    """Asks these engines to go."""

    engine_ids: EngineIds


class ScaleInAt(_In):
    """Asks the servers with these addresses, which joined by them, to go."""

    engine_urls: EngineUrls


TAGS = ("by_number", "by_name", "by_address")  # of the kinds of target, which an error's place then names


def _kind(body: object) -> str:
    """Tells the kinds of target apart by their own key, so that errors are about the right one."""
    keys = body if isinstance(body, dict) else ()
    return TAGS[2] if "engine_urls" in keys else TAGS[1] if "engine_ids" in keys else TAGS[0]


ScaleOut = Annotated[
    Annotated[ScaleOutTo, Tag(TAGS[0])] | Annotated[ScaleOutBy, Tag(TAGS[2])],
    Discriminator(_kind),
]
ScaleIn = Annotated[
    Annotated[ScaleInTo, Tag(TAGS[0])] | Annotated[ScaleInOf, Tag(TAGS[1])] | Annotated[ScaleInAt, Tag(TAGS[2])],
    Discriminator(_kind),
]


class CancelMany(_Body):
    """Asks for the cancellation of the open orders that add engines, or of those in the state ``status_filter``."""

    status_filter: State | None = None


class AutoscalerSwitch(BaseModel):
    """Turns the autoscaler on or off."""

    model_config = ConfigDict(strict=True, extra="forbid")
    enabled: bool
