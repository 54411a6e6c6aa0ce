"""Checks the keys of the reward: its limits, the column by which rows name theirs, and its parts."""

from __future__ import annotations

from collections.abc import Iterator

from relax_core.config.reward_choice import choice_problems
from relax_core.config.schema import RelaxConfig
from relax_core.registry import find_env, find_reward

SANDBOXES = ("auto", "none")


def reward_problems(config: RelaxConfig) -> Iterator[str]:
    """Yields what is wrong with the reward's settings, and with the reward for the data."""
    reward, spec = config.reward, find_reward(config.reward.name)
    if not reward.timeout_s > 0:
        yield f"reward.timeout_s={reward.timeout_s}: must be more than 0 seconds."
    if not reward.memory_gib > 0:
        yield f"reward.memory_gib={reward.memory_gib}: must be more than 0 GiB."
    if reward.sandbox not in SANDBOXES:
        yield f"reward.sandbox={reward.sandbox}: use {' or '.join(SANDBOXES)}."
    if not 0 <= reward.max_failed <= 1:
        yield f"reward.max_failed={reward.max_failed}: a share, from 0 (none may fail) to 1 (all may)."
    yield from choice_problems(spec, reward)
    task, tasks = config.data.task, spec.tasks
    if tasks and task is not None and task not in tasks:
        yield (
            f"reward={reward.name} does not score data={config.data.name}: it scores {', '.join(tasks)} alone. "
            f"Choose another reward (relax list has them), or data.task={tasks[0]}."
        )
    if spec.scores_turns and find_env(config.env.name).messages is not None:
        yield (
            f"reward={reward.name} scores what an env gives for its turns, and env={config.env.name} gives nothing. "
            "Choose an env with turns, or a reward for the answer, such as reward=math."
        )
    if reward.by is not None and task is not None:
        yield (
            f"reward.by={reward.by} with data.task={task}, whose rows have no such column. Drop reward.by, or give "
            "rows that name their reward: data=file data.path=ROWS.jsonl."
        )
