"""How much goes through a step: tokens of a prompt, rows of a micro-batch, samples at an engine at one time.

Responses count at their longest, rollout.max_new_tokens; prompts as the data has them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from relax_core.config.schema import LauncherKind, RelaxConfig
from relax_core.contracts.data import BadRow
from relax_core.data import generated
from relax_core.data.sources import file_rows
from relax_core.plan.look import look_at_data

_LOOKED_AT = 256  # rows of the data
_TEMPLATE_TOKENS = 8  # what a chat template puts around one message
_CHARACTERS_A_TOKEN = 3  # of a real vocabulary, on the low side; a small one has a token a character
_SMALL_VOCABULARY = 1000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """``prompt_source``: where the prompt's length is from, in words. Rows are token rows of a tree-packed group: the
    prompt once, each response without its last token. ``busy_ranks``: data-parallel ranks that get a group of every
    micro-batch; ``micro_batch_groups``, ``_rows`` and ``_tokens`` are of one of them."""

    prompt_tokens: int
    prompt_source: str
    new_tokens: int
    group_size: int
    groups: int
    group_rows: int
    busy_ranks: int
    micro_batch_groups: int
    micro_batch_rows: int
    micro_batch_tokens: int
    micro_batches: int
    sample_tokens: int
    samples_in_flight: int


def find_workload(config: RelaxConfig, *, vocabulary: int) -> Workload:
    """For a validated configuration."""
    prompt, source = _prompt_tokens(config, vocabulary=vocabulary)
    group_size, groups, new = config.algo.group_size, config.rollout.prompts_per_step, config.rollout.max_new_tokens
    group_rows = prompt + group_size * (new - 1)
    ranks = config.parallel.dp
    of_update = groups // config.algo.mini_batches
    together = min(of_update, max(1, config.parallel.micro_batch_tokens // group_rows) * ranks)
    mine = -(-together // ranks)
    engine = config.engine
    sample_tokens = min(prompt + new, engine.context_tokens)
    wanted = (config.mode.max_staleness + 1) * groups * group_size // engine.count
    if config.eval.every:
        wanted = max(wanted, config.eval.rows // engine.count)
    fitting = max(group_size, engine.max_total_tokens // sample_tokens)
    return Workload(
        prompt_tokens=prompt,
        prompt_source=source,
        new_tokens=new,
        group_size=group_size,
        groups=groups,
        group_rows=group_rows,
        busy_ranks=min(ranks, together),
        micro_batch_groups=mine,
        micro_batch_rows=mine * group_rows,
        micro_batch_tokens=mine * group_size * new,
        micro_batches=config.algo.mini_batches * -(-of_update // together),
        sample_tokens=sample_tokens,
        samples_in_flight=min(max(group_size, wanted), engine.max_running_samples, fitting),
    )


def _prompt_tokens(config: RelaxConfig, *, vocabulary: int) -> tuple[int, str]:
    """Tokens of a long prompt, at most what the context leaves beside the response; and how they were found."""
    room = config.engine.context_tokens - config.rollout.max_new_tokens
    data = config.data
    if data.task is not None:
        rows = range(min(_LOOKED_AT, data.size))
        longest = max(
            len(generated.example(data.task, split="train", seed=config.seed, index=row).prompt) for row in rows
        )
    elif config.launcher.name is LauncherKind.ray_job:
        return room, "all that the context leaves: the data lies on another cluster"
    elif data.path is not None or data.paths is not None:
        look = look_at_data(config)
        if look.bound:
            return min(look.bound, room), f"the longest of {look.looked} rows"
        longest = max(map(_characters, _prompts(config)), default=0)
    else:
        return room, "all that the context leaves: there is no data yet"
    characters = 1 if vocabulary < _SMALL_VOCABULARY else _CHARACTERS_A_TOKEN
    found = -(-longest // characters) + _TEMPLATE_TOKENS
    return min(found, room), f"the longest of the first {_LOOKED_AT} rows has {longest} characters"


def _prompts(config: RelaxConfig) -> Iterator[object]:
    """Those of the first rows that can be used."""
    rows, count = file_rows(config.data)
    for number in range(min(_LOOKED_AT, count)):
        with suppress(BadRow):
            yield rows[number]["prompt"]


def _characters(prompt: object) -> int:
    """Of a text, or of chat messages."""
    if isinstance(prompt, str):
        return len(prompt)
    assert isinstance(prompt, list), "checked when the file was opened"
    return sum(len(str(message.get("content", ""))) for message in prompt)
