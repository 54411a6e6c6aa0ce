"""Corrects what SGLang says about the begin and the end of a response."""

from __future__ import annotations

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, Generated, SamplingParams
from relax_core.engines.pool.open_prompts import cut
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION
from relax_core.engines.protocol.version_spans import VersionSpan


def attested(one: Generated) -> Generated:
    """Returns the response without the tokens from the first on that no attested weights have sampled.

    A server has no weight version after its restart, or after an update that failed. It samples one more token of each
    response that is aborted then. The rest of the response counts as aborted, so that it is asked for again.
    """
    unknown = np.flatnonzero(one.versions == UNKNOWN_VERSION)
    return msgspec.structs.replace(cut(one, int(unknown[0])), finish_reason="abort") if unknown.size else one


def prefilled_by_older(first: VersionSpan, sent_under: int, *, cached: int) -> bool:
    """Is True if older weights than those of the response's first token computed a part of the prompt.

    Such a part was either in the cache when the prompt was sent under version ``sent_under``, or it was prefilled
    before the version changed (scheduler_changes.py). ``first`` is the response's first version span; ``cached`` is the
    number of prompt tokens that came from the cache, or True if features of images may have come from one.
    """
    return first.end == 0 or (cached > 0 and first.version > sent_under)


def finish_reason(one: Generated, params: SamplingParams, *, generated: int, limit: int) -> FinishReason:
    """Returns what really ended the response.

    After an abort SGLang generates one more token and still reports abort. If this token is a stop token or the last
    one allowed, the response is finished and must not go on. ``generated`` is the number of tokens that the response
    had before this request, and ``limit`` the most that it may have in all.
    """
    if one.finish_reason == "abort" and one.output_ids.size:
        if int(one.output_ids[-1]) in params.stop_token_ids:
            return "stop"
        if generated + len(one.output_ids) >= limit:
            return "length"
    return one.finish_reason
