"""Makes responses of an engine client from plain lists, and scored episodes of one turn."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from relax_core.contracts.data import DataRow
from relax_core.contracts.engine import FinishReason, Generated, PromptRequest
from relax_core.contracts.kept_tokens import KeptTokens
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tree import group_uid
from relax_core.rollout.episodes.episode_records import EpisodeRecord, one_turn_episodes
from relax_core.rollout.prompt_tokens import AdmittedPrompt


def response(
    ids: Sequence[int],
    *,
    versions: int | Sequence[int],
    logprobs: Sequence[float] | None = None,
    finish_reason: FinishReason = "stop",
    rid: str = "g",
    prompt: int = 0,
    sample: int = 0,
    engine: str = "",
    prompt_experts: np.ndarray | None = None,
    response_experts: np.ndarray | None = None,
    kept: KeptTokens | None = None,
) -> Generated:
    """Returns a response. ``versions``: one per token, or one for all tokens. ``logprobs``: -0.5 by default."""
    arrays = [
        np.array(ids, dtype=np.int32),
        np.array([-0.5] * len(ids) if logprobs is None else logprobs, dtype=np.float32),
        np.array([versions] * len(ids) if isinstance(versions, int) else versions, dtype=np.int32),
    ]
    assert len({len(array) for array in arrays}) == 1
    for array in arrays:
        array.flags.writeable = False
    return Generated(
        rid=rid,
        prompt=prompt,
        sample=sample,
        output_ids=arrays[0],
        logprobs=arrays[1],
        versions=arrays[2],
        finish_reason=finish_reason,
        engine=engine,
        prompt_experts=prompt_experts,
        response_experts=response_experts,
        kept=kept,
    )


class NoText:
    """A tokenizer for tests that never read the text of responses."""

    stop_token_ids: Sequence[int] = ()

    def decode(self, ids: Sequence[int]) -> str:
        return ""


def scored(
    responses: Sequence[Generated],
    rewards: Sequence[float | RewardOutput | None],
    *,
    index: int = 0,
    prompt_ids: Sequence[int] = (1, 2, 3),
) -> list[EpisodeRecord]:
    """Returns the scored one-turn episodes of group ``index``. ``rewards`` are in the order of the responses."""
    uid = group_uid(index)
    request = PromptRequest(rid=uid, input_ids=list(prompt_ids), sampling_seed=0)
    episodes = one_turn_episodes(uid, request, responses, tokenizer=NoText())  # type: ignore[arg-type]
    of = {int(episode.uid.rsplit(".", 1)[1]): episode for episode in episodes}
    for generated, reward in zip(responses, rewards, strict=True):
        of[generated.sample].output = reward if isinstance(reward, RewardOutput) else RewardOutput(reward=reward)
    return episodes


def admitted(index: int, row: DataRow, *, rid: str, evaluation: str = "") -> AdmittedPrompt:
    """Returns an admitted group of an env that opens episodes by itself. The group's data row is row ``index``."""
    request = PromptRequest(rid=rid, input_ids=[], sampling_seed=0)
    return AdmittedPrompt(index=index, row=row, where=f"row {index}", request=request, evaluation=evaluation)


def content(generated: Generated) -> dict[str, object]:
    """Returns the fields of a response for bitwise comparison by ``==``: arrays as dtype, shape and bytes.

    The times of queue and prefill are left out, because they always differ.
    """
    fields = msgspec.structs.asdict(msgspec.structs.replace(generated, prefill_ms=0.0, queue_ms=0.0))
    return {
        name: (value.dtype.str, value.shape, value.tobytes()) if isinstance(value, np.ndarray) else value
        for name, value in fields.items()
    }


def check_arrays(generated: Generated, *, ids: Sequence[int], versions: Sequence[int]) -> None:
    """Asserts these ids and versions, read-only arrays of the contract's types, and one log-prob per token."""
    for array, dtype in (
        (generated.output_ids, np.int32),
        (generated.logprobs, np.float32),
        (generated.versions, np.int32),
    ):
        assert array.dtype == dtype and array.shape == (len(ids),) and not array.flags.writeable
    assert (generated.output_ids.tolist(), generated.versions.tolist()) == (list(ids), list(versions))
