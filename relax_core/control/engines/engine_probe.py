"""Compares what an engine that joins computes with what an engine of the start computes, under the same weights.

The digest of the weights says that they arrived whole. A wrong dtype, quantisation or model shows only here.
"""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import numpy as np

from relax_core.contracts.engine import EngineError
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.engines.protocol.score_calls import TokenScores, TokensToScore
from relax_core.roles.engine.engine_directory import engine_client
from relax_core.roles.process.failure import failure_line
from relax_core.roles.process.role_context import RunContext

PROBE_TOKENS = 64
TOLERANCE = 1e-4  # largest difference of a log-prob with which an engine joins
PROBE_S = 30.0  # in this time both engines have scored the tokens under one version
TRY_S = 0.05
log = logging.getLogger(__name__)
STRIDE = 7919  # a prime, so that the tokens are spread over any vocabulary


def probe_tokens(vocabulary: int, *, context_tokens: int) -> list[int]:
    """Returns the fixed tokens, `PROBE_TOKENS` of them if a sample may have so many."""
    return [index * STRIDE % vocabulary for index in range(1, min(PROBE_TOKENS, context_tokens) + 1)]


class EngineProbe:
    """Compares the log-probs of engines of one run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def start(self, url: str, *, attached: bool, reference: str) -> Future[str]:
        """Compares the engine at ``url`` with that at ``reference`` in a thread.

        The result is "" if they agree, and otherwise why the first one must not serve. ``attached`` says that the first
        one is a server of somebody else.
        """
        found: Future[str] = Future()

        def run() -> None:
            try:
                found.set_result(self._compare(url, reference, attached=attached))
            except Exception as error:  # an engine that cannot be compared does not serve, and the run goes on
                log.exception("the comparison of engine %s ended early", url)
                found.set_result(f"engine {url} was not compared with {reference}: {failure_line(error)}")

        threading.Thread(target=run, name="engine-probe", daemon=True).start()
        return found

    def _compare(self, url: str, reference: str, *, attached: bool) -> str:
        tokens = probe_tokens(
            PromptTokenizer(self._context.model_folder).vocabulary_size,
            context_tokens=self._context.config.engine.context_tokens,
        )
        item = TokensToScore(input_ids=tokens, first=1)
        clients = [
            engine_client(self._context, one, attached=others, request_timeout_s=PROBE_S, control_timeout_s=PROBE_S)
            for one, others in ((url, attached), (reference, False))  # engine.urls says whose engines of the start are
        ]
        deadline, last = time.monotonic() + PROBE_S, ""
        try:
            with ThreadPoolExecutor(2, thread_name_prefix="engine-probe") as pool:
                while time.monotonic() < deadline:
                    calls = [pool.submit(partial(one.score, [item], top_k=0, temperature=1.0)) for one in clients]
                    try:
                        (own,), (other,) = [call.result(max(0.0, deadline - time.monotonic())) for call in calls]
                    except (EngineError, TimeoutError) as error:
                        last = str(error) or "no answer"
                    else:
                        if own.version == other.version:
                            return self._verdict(url, own, other)
                        last = f"they served weights {own.version} and {other.version}"
                    time.sleep(TRY_S)
        finally:
            for one in clients:
                one.close()
        return f"engine {url} was not compared with {reference} within {PROBE_S:g} s: {last}"

    def _verdict(self, url: str, own: TokenScores, other: TokenScores) -> str:
        difference = float(np.abs(own.logprobs - other.logprobs).max())
        if difference <= TOLERANCE:
            return ""
        return (
            f"engine {url} does not compute what the run's engines compute: log-probs of {len(own.logprobs)} tokens "
            f"differ by up to {difference:.3g} under weights {own.version}; "
            f"at most {TOLERANCE:g} is rounding. Its dtype, its quantisation or its model differs."
        )
