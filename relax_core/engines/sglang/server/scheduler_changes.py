"""Changes SGLang's scheduler where weights may change while it works, in each process of a server of the run."""

from __future__ import annotations

from collections.abc import Iterable
from types import ModuleType
from typing import Any

from relax_core.engines.sglang.media import model_changes
from relax_core.engines.sglang.server.import_hooks import after_import

KV_CACHE = "kv_cache"  # SGLang's tag for the memory of its KV cache


def install() -> None:
    """Installs the changes; call it before sglang is imported."""
    after_import("sglang.srt.utils.weight_versions", _record_old_prefixes)
    after_import("sglang.srt.managers.scheduler", _stay_paused_without_cache)
    model_changes.install()


def _record_old_prefixes(module: ModuleType) -> None:
    """Lets the version spans of a request begin with an empty one if older weights computed a part of its prompt.

    A request that is between two chunks of its prefill has cache of the old weights but no token with their version.
    The client sees the empty span and asks for the sample again. SGLang calls this function at every change of the
    version, so that the features of images and videos are forgotten here too.
    """
    record = module.record_weight_version_events

    def with_old_prefixes(reqs: Iterable[Any], old_version: str) -> int:
        model_changes.forget_features()
        requests = list(reqs)
        for request in requests:
            if request.already_computed and not request.output_ids:
                event = module.WeightVersionEvent(old_version=old_version, num_output_tokens=0)
                request.weight_version_events.append(event)
        recorded: int = record(requests, old_version=old_version)
        return recorded

    module.record_weight_version_events = with_old_prefixes  # type: ignore[attr-defined]


def _stay_paused_without_cache(module: ModuleType) -> None:
    """Keeps the server paused while the memory of its KV cache is released.

    A sender of weights ends its pause and may not know that another client has released the memory.
    """
    resume = module.Scheduler.continue_generation

    def unless_released(scheduler: Any, request: Any) -> None:
        if KV_CACHE not in scheduler.weight_updater.offload_tags:
            resume(scheduler, request)

    module.Scheduler.continue_generation = unless_released
