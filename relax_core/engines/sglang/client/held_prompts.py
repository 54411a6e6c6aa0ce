"""Holds the prompts of a call that wait for weights, which SGLang itself does not do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.protocol.request_body import OnTokens
from relax_core.engines.protocol.server_sent_events import UNKNOWN_VERSION
from relax_core.engines.sglang.client.prompt_requests import SampleRequest


@dataclass(eq=False)
class HeldPrompts:
    """Holds the prompts of one call that wait for weights, and the requests that were sent for them after that."""

    prompts: dict[int, PromptRequest]  # index in the caller's prompt batch → prompt
    version: int = UNKNOWN_VERSION  # the server's weight version when the prompts were sent
    aborted: set[str] = field(default_factory=set)
    sent: list[SampleRequest] = field(default_factory=list)
    on_tokens: OnTokens | None = None

    def tell(self, prompt: int, sample: int, start: int, ids: Sequence[int]) -> None:
        """Tells new tokens of prompt number ``prompt`` of the request that was sent."""
        if self.on_tokens is not None:
            self.on_tokens(list(self.prompts)[prompt], sample, start, ids)


def taken_out(call: HeldPrompts, params: SamplingParams) -> Iterator[Generated]:
    """Removes the prompts that were aborted before they were sent, and yields empty responses for them."""
    for index in [index for index, prompt in call.prompts.items() if prompt.rid in call.aborted]:
        prompt = call.prompts.pop(index)
        for sample in range(params.n) if prompt.samples is None else prompt.samples:
            yield never_sent(prompt, index, sample)


def never_sent(prompt: PromptRequest, index: int, sample: int) -> Generated:
    """Returns the response to a prompt that was aborted before it was sent: no token."""
    return Generated(
        rid=prompt.rid,
        prompt=index,
        sample=sample,
        output_ids=np.empty(0, dtype=np.int32),
        logprobs=np.empty(0, dtype=np.float32),
        versions=np.empty(0, dtype=np.int32),
        finish_reason="abort",
    )
