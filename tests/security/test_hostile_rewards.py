"""Tests that no value or text from a reward, an environment, an agent or an algorithm ends a run."""

from __future__ import annotations

import asyncio
import decimal
import fractions
import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from relax_core.contracts.checked_plugins import checked_env, checked_reward
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvSpec,
    EpisodeStart,
    InteractionConfig,
    StepResult,
)
from relax_core.contracts.plugin_results import MAX_REWARD, WrongResult
from relax_core.contracts.reward import (
    MAX_ANSWER,
    MAX_REASON,
    MAX_WHY,
    RewardConfig,
    RewardInput,
    RewardOutput,
    RewardSpec,
)
from relax_core.contracts.untrusted_values import MAX_DEPTH, clean_text, clean_value, shown
from relax_core.registry import plugin_error_text
from relax_core.rollout.agent_processes.agent_tasks import read_result, result_of
from relax_core.rollout.episodes.episode_records import EpisodeRecord
from relax_core.rollout.rewards.reward_calls import score_async, score_sync

HALF = "\ud800"  # half of a surrogate pair
INPUT = RewardInput(response="r", stopped=True, answer="a", row={"prompt": "p", "answer": "a"})
CONFIG = RewardConfig(name="mine")
Scored = Callable[[Any], RewardOutput]


class BrokenNumber(float):
    """A number that raises when its value is read."""

    def __float__(self) -> float:
        raise RuntimeError(f"broken {HALF}")

    def __repr__(self) -> str:
        raise RuntimeError("no description")


class BrokenError(Exception):
    """An error that raises when its text is read."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


def nested(depth: int) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = [value]
    return value


def by_score(came: Any) -> RewardOutput:
    def score(given: RewardInput, config: RewardConfig) -> Any:
        return _raised(came)

    spec = checked_reward(RewardSpec(name="mine", summary="s", config=RewardConfig, score=score))
    return score_sync(spec, [INPUT], CONFIG)[0][0]


def by_group(came: Any) -> RewardOutput:
    def score_group(given: Any, config: RewardConfig) -> Any:
        return [_raised(came), 1.0]

    spec = checked_reward(RewardSpec(name="mine", summary="s", config=RewardConfig, score_group=score_group))
    return score_sync(spec, [INPUT, INPUT], CONFIG)[0][0]


def by_await(came: Any) -> RewardOutput:
    async def score(given: RewardInput, config: RewardConfig) -> Any:
        return _raised(came)

    spec = checked_reward(RewardSpec(name="mine", summary="s", config=RewardConfig, score=score))
    return asyncio.run(score_async(spec, [INPUT], CONFIG))[0][0]


def _raised(came: Any) -> Any:
    if isinstance(came, Exception):
        raise came
    return came


def check_output(output: RewardOutput) -> None:
    """Fails for an output that cannot be stored in a metric, a file, a message or float32."""
    msgspec.msgpack.encode(output)
    msgspec.json.encode(output)
    assert len(output.reason) <= MAX_REASON and len(output.why) <= MAX_WHY
    assert output.answer is None or len(output.answer) <= MAX_ANSWER
    for number in (output.reward, *(output.parts or {}).values()):
        if number is not None:
            squares = torch.full((1000,), number, dtype=torch.float32).square().sum()
            assert bool(torch.isfinite(squares))
    if output.reward is None:
        assert output.reason


UNUSABLE = {
    "1e39": 1e39,
    "1e16": 1e16,
    "float32 max": float(np.finfo(np.float32).max),
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "400 digits": 10**400,
    "5000 digits": -(10**5000),
    "fraction": fractions.Fraction(10**400),
    "numpy 1e39": np.float64(1e39),
    "numpy longdouble": np.longdouble("1e400"),
    "numpy float16 inf": np.float16(math.inf),
    "numpy element": np.array([math.nan]),
    "torch": torch.tensor(1e39, dtype=torch.float64),
    "broken float": BrokenNumber(1.0),
    "decimal": decimal.Decimal("1"),
    "decimal signalling nan": decimal.Decimal("sNaN"),
    "complex": 1j,
    "text": "1.0",
    "huge text": "x" * 10_000_000,
    "half of a pair": HALF,
    "bytes": b"\xff" * 1000,
    "nothing": None,
    "array": np.zeros(2),
    "nested": nested(100_000),
    "long list": [10**5000] * 10_000,
    "huge reward": RewardOutput(reward=10**5000),
    "huge part": RewardOutput(reward=1.0, parts={"p": 10**400}),
    "odd part": RewardOutput(reward=1.0, parts={"p": decimal.Decimal(1)}),  # type: ignore[dict-item]
    "many parts": RewardOutput(reward=1.0, parts={str(n): 1.0 for n in range(100_000)}),
    "exact is text": RewardOutput(reward=1.0, exact="yes"),  # type: ignore[arg-type]
    "exact is nested": RewardOutput(reward=1.0, exact=nested(5000)),
    "answer is a number": RewardOutput(reward=1.0, answer=10**5000),  # type: ignore[arg-type]
    "why is bytes": RewardOutput(reward=1.0, why=b"\xff"),  # type: ignore[arg-type]
    "parts is a list": RewardOutput(reward=1.0, parts=[1.0]),  # type: ignore[arg-type]
    "raises half of a pair": ValueError(HALF),
    "raises huge text": ValueError("x" * 10_000_000),
    "raises nothing": ValueError(""),
    "raises a line break": ValueError("\n\n"),
    "raises no text": BrokenError(),
    "raises recursion": RecursionError(),
    "raises memory": MemoryError(),
    "reason is half of a pair": RewardOutput(reward=None, reason=HALF, cause=HALF),
    "reason is huge": RewardOutput(reward=None, reason="x" * 10_000_000),
}
USABLE = {
    "bool": (True, 1.0),
    "int": (3, 3.0),
    "numpy int": (np.int64(2), 2.0),
    "numpy bool": (np.bool_(True), 1.0),
    "numpy longdouble": (np.longdouble(0.5), 0.5),
    "fraction": (fractions.Fraction(1, 2), 0.5),
    "largest": (MAX_REWARD, MAX_REWARD),
    "denormal": (5e-324, 5e-324),
    "why": (RewardOutput(reward=1.0, why=f"a{HALF}b"), 1.0),
    "huge why": (RewardOutput(reward=1.0, why="x" * 10_000_000), 1.0),
    "answer": (RewardOutput(reward=1.0, answer=HALF * 3), 1.0),
    "huge answer": (RewardOutput(reward=1.0, answer="y" * 10_000_000), 1.0),
    "numpy text": (RewardOutput(reward=1.0, answer=np.str_("4"), why=np.str_("w")), 1.0),
    "name of a part": (RewardOutput(reward=1.0, parts={HALF: 1.0, "n" * 100_000: 2.0}), 1.0),
    "exact": (RewardOutput(reward=1.0, exact=np.bool_(True)), 1.0),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("scored", [by_score, by_group, by_await])
@pytest.mark.parametrize("case", UNUSABLE)
def test_a_value_that_is_no_reward_costs_its_sample_alone(case: str, scored: Scored) -> None:
    output = scored(UNUSABLE[case])
    assert output.reward is None and output.exact is False
    check_output(output)


@pytest.mark.parametrize("scored", [by_score, by_group, by_await])
@pytest.mark.parametrize("case", USABLE)
def test_a_reward_keeps_its_number_whatever_its_texts_are(case: str, scored: Scored) -> None:
    came, wanted = USABLE[case]
    output = scored(came)
    assert output.reward == wanted
    check_output(output)


@pytest.mark.parametrize("number", ["1e39", "400 digits", "5000 digits", "numpy 1e39"])
def test_the_reason_names_the_reward_and_the_value(number: str) -> None:
    reason = by_score(UNUSABLE[number]).reason
    assert "reward mine" in reason
    assert ("digits" if "digits" in number else "1e+39") in reason


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    reward=st.one_of(st.floats(), st.integers(), st.text(), st.none(), st.booleans(), st.fractions()),
    why=st.text(st.characters(codec=None), max_size=400),
    parts=st.none() | st.dictionaries(st.text(st.characters(codec=None), max_size=5), st.floats() | st.integers()),
)
def test_fuzzed_outputs_give_a_reward_that_can_be_kept_or_none(reward: Any, why: str, parts: Any) -> None:
    check_output(by_score(RewardOutput(reward=reward, why=why, answer=why, parts=parts, reason=f"because {why}")))


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(st.characters(codec=None)) | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(codec=None)), inner),
    )
)
def test_any_value_can_be_described_and_cleaned(value: Any) -> None:
    assert len(shown(value)) <= 81
    shown(value).encode()
    msgspec.msgpack.encode(clean_value(_without_huge(value)))


def _without_huge(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_huge(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_without_huge(element) for element in value]
    return value % 1000 if isinstance(value, int) else value


def test_text_without_halves_of_pairs_stays_as_it_is() -> None:
    text = "é漢😀\u202e\x00"
    assert clean_text(text) == text
    assert clean_text(f"a{HALF}b\udfff") == "a\ufffdb\ufffd"


def test_a_value_that_is_nested_too_deeply_is_refused() -> None:
    assert clean_value(nested(MAX_DEPTH)) == nested(MAX_DEPTH)
    with pytest.raises(ValueError, match="nested"):
        clean_value(nested(MAX_DEPTH + 1))
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(ValueError, match="nested"):
        clean_value(loop)


ERRORS = {
    "half of a pair": ValueError(HALF),
    "line break": ValueError("\n"),
    "huge": ValueError("x" * 10_000_000),
    "no text": BrokenError(),
    "5000 digits": KeyError(10**5000),
}


@pytest.mark.parametrize("case", ERRORS)
def test_words_of_an_error_can_be_written_to_a_file(case: str) -> None:
    error = ERRORS[case]
    message = plugin_error_text(error)
    message.encode()
    assert type(error).__name__ in message and "\n" not in message and len(message) < 3000


# -- environments -----------------------------------------------------------------------------------------------------
class Env(BaseInteractionEnv):
    """An env that returns the step and the messages of the test."""

    def __init__(self, step: Any, messages: Any = "") -> None:
        self._step, self._messages = step, messages

    def reset(self) -> Any:
        return None

    def step(self, action: Action) -> StepResult:
        step: StepResult = self._step
        return step

    def format_observation(self, observation: Any) -> Any:
        return self._messages


def opened(step: Any, messages: Any = "") -> BaseInteractionEnv:
    spec = EnvSpec(name="mine", summary="s", config=InteractionConfig, open=lambda start, config: Env(step, messages))
    checked = checked_env(spec).open
    assert checked is not None
    return checked(EpisodeStart(row={}, group_seed=0, episode_seed=0), None)


ACTION = Action(text="a", stopped=True)
NUMBERS = ["1e39", "nan", "inf", "400 digits", "5000 digits", "fraction", "numpy longdouble", "torch"]


@pytest.mark.parametrize("case", NUMBERS)
def test_the_reward_of_an_env_costs_its_episode_alone(case: str) -> None:
    with pytest.raises(ValueError, match="reward is"):  # a WrongResult would be a TypeError and end the run
        opened(StepResult(reward=UNUSABLE[case])).step(ACTION)


INFOS: dict[str, Any] = {
    "5000 digits": {"n": [10**5000]},
    "deep": {"n": nested(100)},
    "very deep": {"n": nested(100_000)},
}


@pytest.mark.parametrize("case", INFOS)
def test_the_info_of_an_env_costs_its_episode_alone(case: str) -> None:
    with pytest.raises(ValueError, match=r"info|nested"):
        opened(StepResult(info=INFOS[case])).step(ACTION)


def test_texts_of_an_env_can_be_kept() -> None:
    message = {"role": "user", "content": f"a{HALF}", "name": HALF, HALF: {"x": [HALF]}}
    env = opened(StepResult(info={HALF: HALF}, state_key=HALF, context_edit=[message]), [message])
    step = env.step(ACTION)
    assert isinstance(step, StepResult)
    msgspec.msgpack.encode((step.info, step.state_key, step.context_edit, env.format_observation(None)))
    with pytest.raises(ValueError, match="nested"):
        opened(StepResult(), [message | {"tool_calls": nested(5000)}]).format_observation(None)


def test_a_wrong_type_of_an_env_ends_the_run_with_its_name() -> None:
    with pytest.raises(WrongResult, match="env mine"):
        opened(StepResult(reward="1")).step(ACTION)  # type: ignore[arg-type]


def test_numbers_of_an_info_are_kept_if_they_are_finite() -> None:
    record = EpisodeRecord(uid="e")
    record.take_info({"good": 1, "huge": 10**400, "inf": math.inf, "nan": math.nan, "text": "x", "big": 1e300})
    assert dict(record.info) == {"good": [1.0]}
    record.fail("env_failed", f"words {HALF}" * 10_000)
    assert len(record.failed.encode()) < 10 * MAX_REASON


# -- agents -----------------------------------------------------------------------------------------------------------
RESULTS: dict[str, Any] = {
    "400 digits": {"reward": 10**400},
    "5000 digits": {"reward": 10**5000},
    "1e39": {"reward": 1e39},
    "nan": {"reward": math.nan},
    "text": {"reward": "1"},
    "deep reward": {"reward": nested(3000)},
    "metric of 400 digits": {"metrics": {"m": 10**400}},
    "deep metric": {"metrics": {"m": nested(3000)}},
    "deep metrics": {"metrics": nested(3000)},
    "deep error": {"error": nested(3000)},
    "half of a pair": {"error": HALF},
    "error of 5000 digits": {"error": [10**5000]},
}


@pytest.mark.parametrize("case", RESULTS)
def test_a_result_of_an_agent_that_cannot_be_used_fails_its_attempt(case: str) -> None:
    result = result_of(RESULTS[case], what="the result")
    assert result.failed and result.reward is None
    result.failed.encode()


@pytest.mark.parametrize(
    "content",
    [b'{"reward": 1' + b"0" * 400 + b"}", b'{"reward": 1' + b"0" * 5000 + b"}", b"[" * 100_000, b'{"a":' * 900],
    ids=["400 digits", "5000 digits", "very deep", "deep"],
)
def test_a_result_file_of_an_agent_fails_its_attempt(content: bytes, tmp_path: Any) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(content)
    assert read_result(file, output="").failed
