"""Writes the plan's sentences about a train step: prompts, samples, groups, updates, micro-batches and staleness."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import cast

from relax_core.config.choices import AUDIO, PROJECTOR, VISION, ModeName, Surplus
from relax_core.config.engine_checks import offline_rows
from relax_core.config.model_checks import textless_token_ids, untrained_parts
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.env import EnvSpec, InteractionConfig, IsolatedConfig, TurnsConfig
from relax_core.data.chat_template import reads_clock, utc_date
from relax_core.plan.memory_terms import MIB, factor_parameters, patches_of_micro_batch
from relax_core.plan.model_dimensions import ModelDimensions
from relax_core.plan.workload import Workload
from relax_core.registry import find_env
from relax_core.rollout.agent_processes.agent_limits import MEMORY_GIB, PROCESSES
from relax_core.rollout.agents.agent_command import agent_command_of, max_concurrent_agents
from relax_core.train.parallel_layout import one_rank
from relax_core.weights.lora_merge import lora_scale


def plural(count: int, noun: str) -> str:
    """Returns the count with the noun: "2 updates" for ``plural(2, "update")``."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun}es" if noun.endswith("batch") else f"{count} {noun}s"


def batch_notes(config: RelaxConfig, work: Workload) -> list[str]:
    """Returns sentences about the batch of a train step. Validation already ensures equal mini-batches."""
    groups, size, ranks = work.groups, work.group_size, config.parallel.dp
    mini_batches, epochs = config.algo.mini_batches, config.algo.epochs
    words = [
        f"{groups} prompts x {size} samples = {groups} groups, {groups * size} samples a train step; "
        f"{config.run.steps} steps train {config.run.steps * groups * size} samples of {config.run.steps * groups} "
        "prompts.",
        f"{groups} groups / {plural(mini_batches, 'mini-batch')} = {groups // mini_batches} groups an update; "
        f"x {plural(epochs, 'epoch')} = {plural(mini_batches * epochs, 'update')} and one weight version a step.",
        f"A group is {work.prompt_tokens} prompt tokens once + {size} x "
        f"{work.episode_rows - work.prompt_tokens} = {work.group_rows} "
        f"token rows at most ({work.prompt_source}).",
        *_micro_batch_notes(config, work),
    ]
    if work.busy_ranks < ranks:
        words.append(
            f"Only {work.busy_ranks} of {ranks} data-parallel ranks have work in a micro-batch: an update has no more "
            f"episodes. Use parallel.dp={work.busy_ranks}."
        )
    return words


def lora_notes(config: RelaxConfig, model: ModelDimensions) -> Iterator[str]:
    """Yields a sentence about the trained LoRA factors."""
    lora = config.model.lora
    if lora.rank:
        factors = factor_parameters(config, one_rank(config.parallel), model)
        scale = lora_scale(rank=lora.rank, alpha=lora.alpha, rslora=lora.rslora)
        yield (
            f"LoRA trains {factors:,} numbers, {factors / model.parameters:.2%} of the model; the product of the "
            f"factors is multiplied by {scale:g}. A learning rate 10 times as high as for the whole model is usual: "
            f"optimizer.lr={config.optimizer.lr:g}."
        )


def _micro_batch_notes(config: RelaxConfig, work: Workload) -> Iterator[str]:
    budget, ranks = config.parallel.micro_batch_tokens, config.parallel.dp
    of_ranks = f"{work.micro_batch_rows} rows at most on {plural(work.busy_ranks, 'data-parallel rank')}"
    passes = f"a pass over the step has {plural(work.micro_batches, 'micro-batch')}."
    if work.groups_together:
        yield f"A micro-batch holds {plural(work.groups_together, 'group')}, {of_ranks}; {passes}"
        cut = "Episodes of one group go to several ranks"
    else:
        cut = (
            f"A group has more rows than parallel.micro_batch_tokens={budget}"
            f"{f' on each of {ranks} ranks' if ranks > 1 else ''}, so its episodes are cut into "
            f"{plural(work.group_pieces, 'piece')}"
        )
        yield f"A micro-batch holds a part of a group, {of_ranks}; {passes}"
    if work.repeated_share:
        yield f"{cut}, each with the prompt: at most {100 * work.repeated_share:.1f}% of the rows are repeated prompts."
    if work.episode_rows > budget:
        yield (
            f"One episode alone, {work.prompt_tokens} prompt and "
            f"{work.episode_rows - work.prompt_tokens} response rows, is more than "
            f"parallel.micro_batch_tokens={budget}: it is never split, so its {work.episode_rows} rows set the peak."
        )


def media_notes(config: RelaxConfig, work: Workload, model: ModelDimensions) -> list[str]:
    """Returns sentences about media: their sizes per prompt and per group on the bus, and their share of compute."""
    if work.media is None or model.patches is None:
        return []
    media, budget = work.media, config.parallel.micro_batch_patches
    if media.prompts:
        looked = f"The headers of the first {plural(media.prompts, 'row')} say"
        items = f"{media.items:.2g} media items a prompt"
    else:
        looked, items = "Without rows yet, a prompt is assumed to be images only", "as large as the context allows"
    most = "" if media.most_patches == media.patches else f" (at most {media.most_patches:,} patches)"
    heard = f", {media.audio_frames:,.0f} frames of sound" if media.sounds else ""
    patches = patches_of_micro_batch(config.parallel, work)
    towers = model.tower_work(patches=media.patches, audio_frames=media.audio_frames)
    words = [
        f"{looked}: {items}, {media.rows:,.0f} rows, {media.patches:,.0f} patches{heard} and "
        f"{media.nbytes / MIB:.2f} MiB of "
        f"tensors on average{most}.",
        f"The bus keeps the tensors of a group once: {media.nbytes / MIB:.2f} MiB, "
        f"{work.groups * media.nbytes / MIB:.1f} MiB a train step.",
        f"On average, the towers' work for a prompt equals the language model's work for {towers:,.0f} rows. The "
        f"towers do {100 * tower_share(config, work, model):.0f}% of a train step's matrix products. At most "
        f"{patches:,} patches pass a rank's tower together (parallel.micro_batch_patches={budget}).",
    ]
    if patches > budget:
        words.append(f"One prompt alone has more patches than parallel.micro_batch_patches={budget} and is never cut.")
    return words


def tower_share(config: RelaxConfig, work: Workload, model: ModelDimensions) -> float:
    """Returns the towers' share of a train step's matrix products, without attention scores.

    A backward pass has twice as many products as a forward pass. A frozen tower has no backward pass.
    """
    assert work.media is not None and model.patches is not None, "a run with media"
    frozen, media = set(untrained_parts(config)), work.media
    seen = model.tower_work(patches=media.patches, audio_frames=0) * (1 if {VISION, PROJECTOR} <= frozen else 3)
    heard = model.tower_work(patches=0, audio_frames=media.audio_frames) * (1 if {AUDIO, PROJECTOR} <= frozen else 3)
    rows = work.group_rows - work.prompt_tokens + work.mean_prompt_tokens
    return (seen + heard) / (seen + heard + 3 * rows)


def context_notes(config: RelaxConfig, work: Workload) -> list[str]:
    """Returns sentences about the tokens of one sample, the banned tokens, and the date in prompts."""
    context, new = config.engine.context_tokens, config.rollout.max_new_tokens
    parts = f"a sample: {context - new} for the prompt, {new} for the response"
    if offline_rows(config) is not None:
        parts = "a data row"
    words = [f"engine.context_length={context} tokens {parts}."]
    if config.model.path is not None:
        with suppress(ValueError, OSError):  # the folder's check reports problems
            words += _folder_notes(config, Path(config.model.path))
    return words


def _folder_notes(config: RelaxConfig, folder: Path) -> Iterator[str]:
    banned, textless = set(config.rollout.banned()), textless_token_ids(folder)
    if banned or textless:
        yield (
            f"rollout.banned_token_ids has {plural(len(banned), 'token')}, which are never sampled. The tokenizer has "
            f"no text for {len(textless)} token ids of the model, and {len(banned & textless)} of them are banned."
        )
    if reads_clock(folder):
        date = config.data.template_date or f"{utc_date()}, the day of the start in UTC"
        yield f"data.template_date: the chat template writes a date, which is {date}."


def episode_notes(config: RelaxConfig, work: Workload) -> list[str]:
    """Returns sentences about episodes of several turns: their sizes, processes and cache."""
    spec = find_env(config.env.name)
    if not spec.has_turns:
        return []
    env, kept = cast(TurnsConfig, config.env), config.engine.prefix_cache_tokens
    of_turn = "" if env.max_turn_tokens is None else f", each with {env.max_turn_tokens} sampled tokens at most"
    words = [
        f"An episode has at most {plural(env.max_turns, 'turn')}{of_turn}, {work.new_tokens} sampled tokens and "
        f"{work.observed_tokens} observed tokens after its first prompt ({_observed(config)}).",
        f"Up to {work.samples_in_flight} episodes are at one engine at the same time; {_timeouts(config)}.",
    ]
    if kept is not None:
        groups = kept / (work.group_size * config.engine.context_tokens)
        words.append(
            f"engine.prefix_cache_tokens={kept} keeps keys and values of {groups:.3g} groups of the longest episodes."
            if kept
            else "engine.prefix_cache_tokens=0: each turn recomputes all earlier tokens."
        )
    if spec.isolated:
        isolated = cast(IsolatedConfig, config.env)
        count, size = config.rollout.workers * isolated.workers, isolated.worker_memory_gib
        words.append(
            f"{count} process{'es' if count > 1 else ''} for the environment ({config.rollout.workers} x env.workers="
            f"{isolated.workers}) with room for {isolated.episodes_per_worker} episodes each. Each process uses a core "
            f"while it computes, and at most {size:g} GiB. The sum below includes the limit of all processes, "
            f"{count * size:g} GiB."
        )
    if spec.agent is not None:
        words += _agents(config, spec)
    return words


def _observed(config: RelaxConfig) -> str:
    if not isinstance(config.env, InteractionConfig):
        return "the rest of the context, because an agent may send any messages"
    return f"env.max_observation_tokens={config.env.observation_tokens} for each observation, and the context"


def _timeouts(config: RelaxConfig) -> str:
    env = config.env
    if not isinstance(env, InteractionConfig):
        return f"each may last agent.timeout_s={config.agent.timeout_s:g} s"
    return (
        f"each may last env.episode_timeout_s={env.episode_timeout_s:g} s, and a call of its environment "
        f"env.step_timeout_s={env.step_timeout_s:g} s"
    )


def _agents(config: RelaxConfig, spec: EnvSpec) -> list[str]:
    """Returns sentences about the agents: how they start, how many run at the same time, and their limits."""
    agent, at_once = config.agent, max_concurrent_agents(config) * config.rollout.workers
    endpoint = f"{config.endpoint.host}, port {config.endpoint.port or 'any free one'}"
    if not (command := agent_command_of(config, spec)):
        return [f"External agents ask for up to {at_once} tasks at one time at {endpoint}."]
    how = f"{at_once} processes take task after task" if agent.workers else "each in a separate process"
    return [
        f"Agents play up to {plural(at_once, 'episode')} at one time, {how}: {shlex.join(command)}. The endpoint is at "
        f"{endpoint}.",
        f"Each agent may use {MEMORY_GIB:g} GiB (all agents {at_once * MEMORY_GIB:g} GiB) and have {PROCESSES} "
        "processes. The sum below assumes small agents.",
    ]


def order_notes(config: RelaxConfig) -> Iterator[str]:
    """Warns that the same seed does not repeat a run with several rollout workers, even at staleness 0."""
    if config.mode.max_staleness == 0 and not config.in_order:
        yield (
            f"mode.max_staleness=0 with rollout.workers={config.rollout.workers}: the assignment of groups to workers "
            "depends on timing, so the same seed gives a different run. With rollout.workers=1 the run is the same."
        )


def credit_notes(config: RelaxConfig, work: Workload) -> list[str]:
    """Returns sentences about the groups in flight and the staleness of trained tokens."""
    staleness, groups = config.mode.max_staleness, work.groups
    spares = config.rollout.spare_prompts
    kept = config.rollout.surplus is Surplus.keep
    credits = (staleness + 1) * groups + spares * (1 if kept else staleness + 1)
    if offline_rows(config) is not None:
        return [f"At most {credits} data rows are read and not yet trained."]
    turns = " Rollout and trainer alternate." if config.mode.name is ModeName.colocate else ""
    return [
        f"Credits: (max_staleness {staleness} + 1) x {groups} groups{_spare_groups_text(spares, kept)} = at most "
        f"{credits} groups, {credits * work.group_size} samples, that are generated and not yet trained.",
        f"A token is trained at most {plural(staleness, 'weight version')} after the version that sampled it.{turns}",
        f"One engine runs up to {work.samples_in_flight} samples at the same time.",
    ]


def _spare_groups_text(spares: int, kept: bool) -> str:
    """Describes the groups that over-sampling generates in addition to the groups that the steps need."""
    if not spares:
        return ""
    return f" + {spares} spare, kept for later steps" if kept else f", each step with {spares} spare groups"
