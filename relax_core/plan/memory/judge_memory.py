"""Computes the peak memory of the engines that a run starts for judges."""

from __future__ import annotations

from dataclasses import replace

from relax_core.config.schema import RelaxConfig
from relax_core.contracts.judging.judge import JudgeConfig
from relax_core.families.tiny_configs import MAX_POSITIONS, MODEL_NAMES
from relax_core.plan.memory.memory_terms import MIB, Holder, Phase, engine_bytes
from relax_core.plan.model.dimensions import ModelDimensions
from relax_core.plan.model.model_source import teacher_dimensions
from relax_core.registry import find_engine
from relax_core.rollout.judges.judge_choice import judge_engine, judge_plan

CHARACTERS_A_TOKEN = 3  # a low estimate, for real vocabularies
TEXTS = 3  # of a prompt that may each have max_response_chars: question, reference, response


def own_judges(config: RelaxConfig) -> dict[str, JudgeConfig]:
    """Returns the judges by name that have engines of the run."""
    plan = judge_plan(config)
    judges = {} if plan is None else {name: setup.settings for name, setup in plan.judges.items()}
    return {name: judge for name, judge in judges.items() if judge.url is None}


def judge_model(judge: JudgeConfig) -> ModelDimensions:
    """Returns the dimensions of a judge's model. Raises ValueError for a folder that cannot be read."""
    assert judge.model is not None, "the reward's own check has passed"
    return teacher_dimensions(judge.model, family=None)


def with_judge_engine(config: RelaxConfig, judge: JudgeConfig) -> RelaxConfig:
    """Returns the configuration with the judge's engines as its engines."""
    model = judge_model(judge)
    positions = MAX_POSITIONS if judge.model in MODEL_NAMES else model.positions
    return replace(config, engine=judge_engine(config.engine, judge, positions=positions or MAX_POSITIONS))


def judge_holders(config: RelaxConfig) -> list[Holder]:
    """Returns the memory of each judge's engines on CPU cores; the responses to a train step are judged at once."""
    return [_holder(config, name, judge) for name, judge in own_judges(config).items()]


def _holder(config: RelaxConfig, name: str, judge: JudgeConfig) -> Holder:
    model, engine, size = judge_model(judge), with_judge_engine(config, judge).engine, engine_bytes(config)
    prompt = min(engine.context_tokens, TEXTS * judge.max_response_chars // CHARACTERS_A_TOKEN + judge.max_new_tokens)
    asked = config.rollout.prompts_per_step * config.algo.group_size * judge.votes
    at_once = min(asked, config.rollout.reward_concurrency * judge.votes, engine.max_running_samples)
    tokens = min(-(-at_once // judge.count) * prompt, engine.max_total_tokens)
    terms = {
        "imports": find_engine(judge.engine).memory_mib * MIB,
        "weights": model.parameters * size,
        f"KV cache ({tokens} tokens)": tokens * model.cache_values_per_token * size,
    }
    return Holder(name=f"judge {name}", count=judge.count, phases=(Phase(name="rollout", terms=terms),))
