"""What SGLang's scheduler lacks where weights change while it works: in each process of a server of ours."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from relax_core.engines.sglang.server.import_hooks import after_import

KV_CACHE = "kv_cache"  # SGLang's tag of its memory


def install() -> None:
    """Before sglang is imported."""
    after_import("sglang.srt.utils.weight_versions", _tells_old_prefixes)
    after_import("sglang.srt.managers.scheduler", _stays_paused_without_cache)


def _tells_old_prefixes(module: ModuleType) -> None:
    """A request that is between two chunks of its prefill has cache of the old weights, but no token yet that would
    tell. Here its spans begin with one of the old version and no tokens; the client asks for it again."""
    record = module.record_weight_version_events

    def told(reqs: Iterable[Any], old_version: str) -> int:
        requests = list(reqs)
        for request in requests:
            if request.already_computed and not request.output_ids:
                event = module.WeightVersionEvent(old_version=old_version, num_output_tokens=0)
                request.weight_version_events.append(event)
        recorded: int = record(requests, old_version=old_version)
        return recorded

    module.record_weight_version_events = told  # type: ignore[attr-defined]


def _stays_paused_without_cache(module: ModuleType) -> None:
    """Whoever brings weights goes on after that, and may not know that somebody else has taken the cache's memory: the
    pause then ends once that is back."""
    go_on = module.Scheduler.continue_generation

    def unless_released(scheduler: Any, request: Any) -> None:
        if KV_CACHE not in scheduler.weight_updater.offload_tags:
            go_on(scheduler, request)

    module.Scheduler.continue_generation = unless_released
