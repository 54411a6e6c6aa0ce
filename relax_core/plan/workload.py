"""Computes the sizes of a train step: tokens of a prompt, rows of a micro-batch, concurrent samples of an engine.

Responses are assumed to have the maximum length, rollout.max_new_tokens. Prompts have their lengths in the data.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import cast

from relax_core.config.choices import LauncherKind
from relax_core.config.engine_checks import engine_count, offline_rows
from relax_core.config.modality import media_kinds
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.data import BadRow
from relax_core.contracts.env import InteractionConfig
from relax_core.data import generated
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.sources import are_rows_named, file_rows
from relax_core.plan.data_check import PromptMedia, summarize_data
from relax_core.plan.model_dimensions import ModelDimensions, PatchCost
from relax_core.registry import find_env

_LOOKED_AT = 256  # number of data rows to read
_TEMPLATE_TOKENS = 8  # number of tokens that a chat template adds to a message
_CHARACTERS_A_TOKEN = (
    # low estimate of the characters per token of a real vocabulary; a small vocabulary has a token for each character
    3
)
_SMALL_VOCABULARY = 1000


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Holds the sizes of a train step.

    ``prompt_source`` is the source of the prompt's length, as text. ``observed_tokens`` is the maximum number of tokens
    that an environment of several turns adds to an episode.

    Rows are the token rows that the trainer computes for a group: the prompt once, and each response without its last
    token. ``group_rows`` is the number of rows of a whole group, and ``episode_rows`` the number of rows of one
    episode. ``busy_ranks`` is the number of data-parallel ranks with work in a micro-batch; ``micro_batch_rows`` and
    ``micro_batch_tokens`` (response tokens) are the largest numbers on one such rank. ``groups_together`` is the number
    of groups in a micro-batch over all ranks; it is 0 if a group is split into ``group_pieces`` pieces, each with the
    prompt. ``micro_batches`` is the number of micro-batches in one pass over the step. ``repeated_share`` is the
    largest share of all computed rows that are repeated prompts. ``media`` describes the media of a prompt; it is None
    for a text-only run. The towers' work for media counts toward the budget of a micro-batch. ``mean_prompt_tokens`` is
    the number of tokens of a prompt with the mean number of media rows, and ``media_prompts`` is the number of such
    prompts in a micro-batch on one rank.
    """

    prompt_tokens: int
    prompt_source: str
    new_tokens: int
    observed_tokens: int
    group_size: int
    groups: int
    group_rows: int
    episode_rows: int
    busy_ranks: int
    groups_together: int
    group_pieces: int
    micro_batch_rows: int
    micro_batch_tokens: int
    micro_batches: int
    repeated_share: float
    sample_tokens: int
    samples_in_flight: int
    media: PromptMedia | None = None
    media_prompts: int = 0
    mean_prompt_tokens: int = 0


def find_workload(config: RelaxConfig, model: ModelDimensions, *, state_tokens: int = 0) -> Workload:
    """Returns the sizes of a train step for a validated configuration.

    Without data rows, a multimodal prompt is assumed to be images only. ``state_tokens`` is the size of a sample's
    states in tokens of engine.max_total_tokens.
    """
    prompt, source = _prompt_tokens(config, vocabulary=model.vocabulary)
    media = None if model.patches is None else _prompt_media(config, model.patches, prompt=prompt)
    towers = 0 if media is None else round(model.tower_work(patches=media.patches, audio_frames=media.audio_frames))
    group_size, groups, new = config.algo.group_size, config.rollout.prompts_per_step, config.rollout.max_new_tokens
    observed = observed_tokens(config, prompt=prompt)
    if offline_rows(config) is not None:
        prompt, source, observed = 1, "each data row has the longest context, and all its tokens are trained", 0
        new = config.engine.context_tokens - prompt
    branch, ranks = new - 1 + observed, config.parallel.dp
    group_rows, episode_rows = prompt + group_size * branch, prompt + branch
    of_update = groups // config.algo.mini_batches
    busy = min(ranks, of_update * group_size)
    budget = config.parallel.micro_batch_tokens
    packed = pack_update(of_update, group_size, prompt=prompt + towers, branch=branch, budget=budget, ranks=ranks)
    episodes, rows = _largest_share(of_update, group_size, prompt=prompt, branch=branch, ranks=busy)
    if packed.micro_batches > 1:
        # If responses are shorter, more episodes fit, up to the budget.
        rows = min(rows, max(budget, episode_rows))
        episodes = min(episodes, max(1, rows // branch))
    computed = of_update * group_rows + packed.repeated_prompts * prompt
    engine = config.engine
    sample_tokens = min(prompt + new + observed, engine.context_tokens)
    engines = max(1, engine_count(config))
    wanted = config.mode.versions_in_flight * groups * group_size // engines
    if config.eval.every:
        wanted = max(wanted, config.eval.rows // engines)
    fitting = max(group_size, engine.max_total_tokens // (sample_tokens + state_tokens))
    mean_prompt = _mean_prompt(config, media, prompt=prompt)
    mean_work = group_rows - prompt + mean_prompt + (towers if packed.micro_batches > 1 else 0)
    return Workload(
        prompt_tokens=prompt,
        prompt_source=source,
        new_tokens=new,
        observed_tokens=observed,
        group_size=group_size,
        groups=groups,
        group_rows=group_rows,
        episode_rows=episode_rows,
        busy_ranks=busy,
        groups_together=packed.groups_together,
        group_pieces=packed.group_pieces,
        micro_batch_rows=rows,
        micro_batch_tokens=episodes * new,
        micro_batches=config.algo.mini_batches * packed.micro_batches,
        repeated_share=packed.repeated_prompts * prompt / computed,
        sample_tokens=sample_tokens,
        samples_in_flight=min(max(group_size, wanted), engine.max_running_samples, fitting),
        media=media,
        media_prompts=max(1, min(-(-of_update // busy), -(-rows // mean_work))),
        mean_prompt_tokens=mean_prompt,
    )


def observed_tokens(config: RelaxConfig, *, prompt: int) -> int:
    """Returns the maximum number of tokens that an environment adds after the first response, within the context."""
    spec = find_env(config.env.name)
    if not spec.has_turns:
        return 0
    room = config.engine.context_tokens - prompt - config.rollout.max_new_tokens
    if spec.agent is not None:  # an agent may send messages of any length
        return max(0, room)
    return max(0, min(cast(InteractionConfig, config.env).max_observed_tokens, room))


@dataclass(frozen=True, kw_only=True)
class PackedUpdate:
    """Holds the division of one update's groups into micro-batches if all groups are equally long.

    `Workload` describes ``groups_together`` and ``group_pieces``. ``repeated_prompts`` is the largest number of
    repeated computations of a prompt.
    """

    groups_together: int
    group_pieces: int
    micro_batches: int
    repeated_prompts: int


def pack_update(groups: int, group_size: int, *, prompt: int, branch: int, budget: int, ranks: int) -> PackedUpdate:
    """Returns the micro-batches of `relax_core.train.micro_batches` for ``groups`` equal groups.

    Each group has ``group_size`` episodes with ``prompt`` shared rows and ``branch`` separate rows each. A rank gets at
    most ``budget`` rows, or one longer episode.
    """
    together = 0
    pieces = 1
    for number, bins in enumerate(_filled_bins(groups, group_size, prompt=prompt, branch=branch, budget=budget), 1):
        if number == 1:
            pieces = bins
        if bins > ranks:
            break
        together = number
    if together == 0:
        micro_batches = -(-pieces // ranks)
        return PackedUpdate(
            groups_together=0,
            group_pieces=min(group_size, micro_batches * ranks),  # every rank gets a piece if there are enough pieces
            micro_batches=groups * micro_batches,
            repeated_prompts=groups * (min(group_size, micro_batches * ranks) - 1),
        )
    repeated = 0
    # at most one split group between two ranks; no split if groups divide evenly
    for first in range(0, groups, together):
        share = min(together, groups - first)
        repeated += 0 if share % ranks == 0 else min(ranks, share * group_size) - 1
    return PackedUpdate(
        groups_together=together,
        group_pieces=1,
        micro_batches=-(-groups // together),
        repeated_prompts=repeated,
    )


def _filled_bins(groups: int, group_size: int, *, prompt: int, branch: int, budget: int) -> Iterator[int]:
    """Yields after each group how many bins of ``budget`` rows all episodes so far fill in order."""
    bins, room = 0, 0
    for _ in range(groups):
        has_prompt = False
        for _ in range(group_size):
            rows = branch if has_prompt else prompt + branch
            if bins == 0 or rows > room:
                bins, room, rows = bins + 1, budget, prompt + branch
            room -= rows
            has_prompt = True
        yield bins


def _largest_share(groups: int, group_size: int, *, prompt: int, branch: int, ranks: int) -> tuple[int, int]:
    """Returns the episodes and rows of the data-parallel rank with the most rows if an update is one micro-batch."""
    if groups % ranks == 0:
        return groups // ranks * group_size, groups // ranks * (prompt + group_size * branch)
    episodes = -(-groups * group_size // ranks)
    prompts = min(groups, -(-episodes // group_size) + 1)
    return episodes, prompts * prompt + episodes * branch


def _prompt_tokens(config: RelaxConfig, *, vocabulary: int) -> tuple[int, str]:
    """Returns the tokens of the longest known prompt and their source as text.

    The tokens are at most the context minus the response.
    """
    room = config.engine.context_tokens - config.rollout.max_new_tokens
    data = config.data
    if data.task is not None:
        rows = range(min(_LOOKED_AT, data.size))
        longest = max(
            len(generated.example(data.task, split="train", seed=config.seed, index=row).prompt) for row in rows
        )
    elif config.launcher.name is LauncherKind.ray_job:
        return room, "the rest of the context, because the data is on another cluster"
    elif are_rows_named(data):
        look = summarize_data(config)
        if look.bound:
            return min(look.bound, room), f"the longest of {look.looked} rows"
        longest = max(map(_characters, _prompts(config)), default=0)
    else:
        return room, "the rest of the context, because there is no data yet"
    characters = 1 if vocabulary < _SMALL_VOCABULARY else _CHARACTERS_A_TOKEN
    found = -(-longest // characters) + _TEMPLATE_TOKENS
    source = f"the longest of the first {_LOOKED_AT} rows has {longest} characters"
    if media := generated.MEDIA_ROWS.get(data.task or "", 0):
        found, source = found + media, f"{source}, and media at most {media} rows"
    return min(found, room), source


def _prompt_media(config: RelaxConfig, patches: PatchCost, *, prompt: int) -> PromptMedia | None:
    """Returns the media of the checked rows; without rows, of a prompt with one image as large as the limits allow."""
    if not media_kinds(config):
        return None
    has_rows = config.data.task is not None or are_rows_named(config.data)
    if has_rows and config.launcher.name is not LauncherKind.ray_job:
        look = summarize_data(config)
        if look.media is not None:
            return look.media
    most = prompt * patches.a_row
    return PromptMedia(
        prompts=0,
        items=1.0,
        rows=prompt,
        patches=most,
        nbytes=most * patches.pixel_bytes,
        most_rows=prompt,
        most_patches=most,
        most_bytes=most * patches.pixel_bytes,
        item_patches=min(most, config.modality.image_tokens[1] * patches.a_row),
        source_pixels=MediaLimits.source_pixels,
        videos="video" in media_kinds(config),
        sounds="audio" in media_kinds(config),
    )


def _mean_prompt(config: RelaxConfig, media: PromptMedia | None, *, prompt: int) -> int:
    """Returns the tokens of a prompt with the mean number of media rows."""
    if media is None:
        return prompt
    counted = generated.MEDIA_ROWS.get(config.data.task or "", media.most_rows)
    return max(1, round(prompt - counted + media.rows))


def _prompts(config: RelaxConfig) -> Iterator[object]:
    """Yields the prompts of the first usable rows."""
    rows, count = file_rows(config.data, offline=offline_rows(config))
    for number in range(min(_LOOKED_AT, count)):
        with suppress(BadRow):
            yield rows[number]["prompt"]


def _characters(prompt: object) -> int:
    """Counts the characters of a text or of chat messages."""
    if isinstance(prompt, str):
        return len(prompt)
    assert isinstance(prompt, list), "the file's check accepts only these types"
    return sum(len(str(message.get("content", ""))) for message in prompt)
