"""Says which judges a run asks, and which of them have engines of the run."""

from __future__ import annotations

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judge import JudgePlan
from relax_core.registry import find_reward


def judge_plan(config: RelaxConfig) -> JudgePlan | None:
    """Returns the judges of the run's reward, or None if it asks none; the reward's own check must have passed."""
    judges = find_reward(config.reward.name).judges
    return None if judges is None else judges(config.reward)


def judge_engines(config: RelaxConfig) -> list[str]:
    """Returns the judge of each engine that the run starts for judges, in the order of the engines."""
    plan = judge_plan(config)
    if plan is None:
        return []
    own = [(name, setup.settings.count) for name, setup in plan.judges.items() if setup.settings.url is None]
    return [name for name, count in own for _ in range(count)]
