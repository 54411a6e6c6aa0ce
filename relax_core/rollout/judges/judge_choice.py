"""Derives a run's judges, their engines, and the settings of these engines from the configuration."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from relax_core.config.reward_choice import judged_reward
from relax_core.config.schema import EngineConfig, RelaxConfig
from relax_core.contracts.judge import JudgeConfig, JudgePlan
from relax_core.families.hf_config import language_values, read_hf_config
from relax_core.registry import find_engine


def judge_plan(config: RelaxConfig) -> JudgePlan | None:
    """Returns the judges of the run's rewards, or None. The rewards' settings must have passed their checks."""
    chosen = judged_reward(config.reward)
    if chosen is None:
        return None
    assert chosen.spec.judges is not None
    return chosen.spec.judges(chosen.config)


def judge_engines(config: RelaxConfig) -> list[str]:
    """Returns the judge's name for each engine that the run starts for a judge, in the order of the engines."""
    plan = judge_plan(config)
    if plan is None:
        return []
    own = [(name, setup.settings.count) for name, setup in plan.judges.items() if setup.settings.url is None]
    return [name for name, count in own for _ in range(count)]


def judge_engine(engine: EngineConfig, judge: JudgeConfig, *, positions: int) -> EngineConfig:
    """Returns the settings of a judge's engine: the settings of the run's engines, with the judge's kind and context.

    A judge with another kind of engine does not get the settings that only the run's kind of engine reads.
    ``positions`` is the number of positions of the judge's model.
    """
    same_kind = judge.engine == engine.name
    kept = replace(engine, urls=[], token_file=None, tp=1, port=0)
    if not same_kind:
        kept = replace(kept, python=None, mem_fraction=None, deterministic=None, flags={})
    return replace(
        kept,
        name=judge.engine,
        count=judge.count,
        context_length=min(positions, engine.max_total_tokens),
        prefix_cache_tokens=0 if "prefix_cache_tokens" in find_engine(judge.engine).keys else None,
    )


def judge_positions(folder: Path) -> int:
    """Returns the number of positions of the model in a Hugging Face folder: the maximum tokens of a sequence."""
    return int(language_values(read_hf_config(folder))["max_position_embeddings"])
