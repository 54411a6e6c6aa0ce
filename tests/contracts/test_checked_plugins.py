"""Tests accepted results of plug-ins, and the errors for invalid results."""

from __future__ import annotations

import asyncio
import copy
import inspect
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from algorithms import grpo, reinforce_pp
from envs import single_turn
from relax_core.contracts.algorithm import AdvantageInputs, LossInputs, LossOutputs, StepTotals
from relax_core.contracts.checked_plugins import checked_algorithm, checked_data_source, checked_env, checked_reward
from relax_core.contracts.data import BaseDataSource, DataSourceConfig, DataSourceSpec
from relax_core.contracts.env import (
    Action,
    BaseInteractionEnv,
    EnvConfig,
    EnvSpec,
    EpisodeStart,
    InteractionConfig,
    StepResult,
)
from relax_core.contracts.plugin_results import PluginStopped, WrongResult, contain_exits, contained
from relax_core.contracts.reward import RewardConfig, RewardInput, RewardOutput, RewardSpec

GIVEN = RewardInput(response="r", stopped=True, answer="a", row={})


def reward(came: Any) -> RewardOutput:
    spec = RewardSpec(name="mine", summary="s", config=RewardConfig, score=lambda given, config: came)
    output = checked_reward(spec).score(GIVEN, RewardConfig(name="mine"))
    assert isinstance(output, RewardOutput)
    return output


@pytest.mark.parametrize(
    ("came", "wanted", "exact"),
    [
        (0.25, 0.25, False),
        (1, 1.0, True),
        (True, 1.0, True),
        (False, 0.0, False),
        (np.float32(0.5), 0.5, False),
        (np.int64(1), 1.0, True),
        (np.array(0.5), 0.5, False),
        (np.array([0.5]), 0.5, False),
        (np.bool_(True), 1.0, True),
        (torch.tensor(0.5), 0.5, False),
        (torch.tensor([1.0]), 1.0, True),
        (RewardOutput(reward=np.float64(0.5), exact=np.bool_(True)), 0.5, True),
    ],
)
def test_numbers_are_rewards(came: Any, wanted: float, exact: bool) -> None:
    output = reward(came)
    assert (output.reward, output.exact) == (wanted, exact)
    assert type(output.reward) is float and type(output.exact) is bool


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ("1.0", "returned '1.0' of type str"),
        (None, "returned None of type NoneType"),
        ([1.0], "of type list"),
        ({"score": 1.0}, "of type dict"),
        (np.zeros(2), "of type ndarray"),
        (RewardOutput(reward="1"), "returned reward='1' of type str"),  # type: ignore[arg-type]
        (RewardOutput(reward=1.0, exact="yes"), "returned exact='yes' of type str"),  # type: ignore[arg-type]
        (RewardOutput(reward=1.0, parts={"p": "x"}), "returned parts={'p': 'x'} of type dict"),  # type: ignore[dict-item]
        (RewardOutput(reward=1.0, answer=3), "returned answer=3 of type int"),  # type: ignore[arg-type]
        (RewardOutput(reward=None, reason=3), "returned reason=3 of type int"),  # type: ignore[arg-type]
    ],
)
def test_a_wrong_result_is_reported_with_plugin_file_and_expected_type(came: Any, message: str) -> None:
    with pytest.raises(WrongResult) as error:
        reward(came)
    assert message in str(error.value)
    assert str(error.value).startswith(f"reward mine ({__file__}): <lambda> returned")
    assert "Wanted: " in str(error.value)


@pytest.mark.parametrize("came", ["hello", [], None, [{"role": "user"}], [{"role": "user", "content": 3}], ["hello"]])
def test_an_env_returns_a_conversation(came: Any) -> None:
    spec = EnvSpec(name="mine", summary="s", config=single_turn.SPEC.config, messages=lambda row, config: came)
    with pytest.raises(WrongResult, match=r"test_checked_plugins.py\): .*Wanted: a list that is not empty"):
        checked_env(spec).messages({}, None)
    message = [{"role": "user", "content": "p"}]
    whole = EnvSpec(name="mine", summary="s", config=single_turn.SPEC.config, messages=lambda row, config: message)
    assert checked_env(whole).messages({}, None) == message


def group() -> AdvantageInputs:
    return AdvantageInputs(
        rewards=torch.tensor([0.0, 1.0]),
        lengths=torch.tensor([2, 1]),
        loss_mask=torch.ones(3, dtype=torch.bool),
        sample_ids=torch.tensor([0, 0, 1]),
    )


@pytest.mark.parametrize(
    ("came", "message"),
    [
        (torch.zeros(2), "a Tensor of shape [2] and dtype torch.float32"),
        (torch.zeros(3, dtype=torch.int64), "dtype torch.int64"),
        (torch.tensor([0.0, float("nan"), 0.0]), "the tensor[1]=nan"),
        ([0.0, 0.0, 0.0], "of type list"),
        (None, "None of type NoneType"),
    ],
)
def test_advantages_are_one_finite_number_a_token(came: Any, message: str) -> None:
    config = grpo.SPEC.config(name="grpo", group_size=2)
    wrong = checked_algorithm(replace(grpo.SPEC, advantages=lambda inputs, config: came))
    with pytest.raises(WrongResult) as error:
        wrong.advantages(group(), config)
    assert message in str(error.value) and "shape [3]" in str(error.value)
    assert str(error.value).startswith(f"algorithm grpo ({__file__})")
    normalised = checked_algorithm(replace(reinforce_pp.SPEC, normalize=lambda values, inputs, config: [came]))
    assert normalised.normalize is not None
    with pytest.raises(WrongResult, match="group 0"):
        normalised.normalize([torch.zeros(3)], [group()], config)


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda inputs, config: inputs.logprobs.sum(), "Wanted: LossOutputs"),
        (lambda inputs, config: LossOutputs(loss_sum=inputs.logprobs), "a float tensor of shape [], the sum"),
        (lambda inputs, config: LossOutputs(loss_sum=3.0), "returned loss_sum=3.0 of type float"),  # type: ignore[arg-type]
        (
            lambda inputs, config: LossOutputs(
                loss_sum=inputs.logprobs.sum(), metric_sums={"kl": inputs.logprobs.sum()}
            ),
            "metric_sums['kl']",
        ),
    ],
)
def test_a_loss_is_a_sum(loss: Callable[..., Any], message: str) -> None:
    wrong = checked_algorithm(replace(grpo.SPEC, loss=loss))
    ones = torch.ones(3)
    inputs = LossInputs(
        logprobs=ones,
        old_logprobs=ones,
        rollout_logprobs=ones,
        advantages=ones,
        loss_mask=ones.bool(),
        sample_ids=torch.tensor([0, 0, 1]),
        num_samples=2,
    )
    with pytest.raises(WrongResult) as error:
        wrong.loss(inputs, None)
    assert message in str(error.value)


@pytest.mark.parametrize("came", [0, -1.0, float("nan"), None, "3"])
def test_a_denominator_is_above_0(came: Any) -> None:
    wrong = checked_algorithm(replace(grpo.SPEC, denominator=lambda totals, config: came))
    with pytest.raises(WrongResult, match="a finite number above 0"):
        wrong.denominator(StepTotals(tokens=3, samples=2, groups=1), None)


class TurnsEnv(BaseInteractionEnv):
    """An env that returns the results of the test."""

    def __init__(self, came: Any) -> None:
        self.came = came

    def reset(self) -> Any:
        return self.came

    def step(self, action: Action) -> StepResult:
        came: StepResult = self.came
        return came


class WaitingEnv(TurnsEnv):
    async def step(self, action: Action) -> StepResult:  # type: ignore[override]
        return super().step(action)


START = EpisodeStart(row={}, group_seed=0, episode_seed=1)
ACTION = Action(text="r", stopped=True)


def opened(came: Any, kind: Callable[[Any], Any] = TurnsEnv, **given: Any) -> BaseInteractionEnv:
    spec = EnvSpec(name="mine", summary="s", config=InteractionConfig, open=lambda start, config: kind(came), **given)
    checked = checked_env(spec).open
    assert checked is not None
    return checked(START, None)


@pytest.mark.parametrize(
    ("came", "message"),
    [
        ("ok", "step returned 'ok' of type str. Wanted: StepResult"),
        (StepResult(reward="1"), "step returned reward='1' of type str"),  # type: ignore[arg-type]
        (StepResult(done="yes"), "step returned done='yes' of type str. Wanted: True or False"),  # type: ignore[arg-type]
        (StepResult(info=[1]), r"step returned info=\[1\] of type list"),  # type: ignore[arg-type]
    ],
)
@pytest.mark.parametrize("kind", [TurnsEnv, WaitingEnv])
def test_a_step_is_checked_in_a_plain_and_in_an_async_method(kind: type[TurnsEnv], came: Any, message: str) -> None:
    async def step() -> None:
        result = opened(came, kind).step(ACTION)
        if inspect.isawaitable(result):
            await result

    with pytest.raises(WrongResult, match=rf"env mine \(.*test_checked_plugins.py\): {message}"):
        asyncio.run(step())


def test_an_env_that_says_that_it_gives_state_keys_gives_them() -> None:
    with pytest.raises(WrongResult, match=r"step returned state_key=None of .*Wanted: text, because its SPEC"):
        opened(StepResult(), state_keys=True).step(ACTION)
    with pytest.raises(WrongResult, match=r"step returned state_key=3 of type int\. Wanted: text, or None"):
        opened(StepResult(state_key=3)).step(ACTION)  # type: ignore[arg-type]
    assert opened(StepResult(state_key="s"), state_keys=True).step(ACTION) == StepResult(state_key="s")


def test_tools_become_schemas_and_two_of_one_name_are_refused() -> None:
    def run(code: str) -> str:
        """Runs code."""
        return code

    def tools_of(came: Any) -> Any:
        spec = EnvSpec(
            name="mine",
            summary="s",
            config=InteractionConfig,
            open=lambda start, config: TurnsEnv(None),
            tools=lambda row, config: came,
        )
        checked = checked_env(spec).tools
        assert checked is not None
        return checked({}, None)

    (schema,) = tools_of([run])
    assert schema["function"]["name"] == "run" and "code" in schema["function"]["parameters"]["properties"]
    with pytest.raises(WrongResult, match=r"env mine \(.*tool run: two tools have this name\. Rename one"):
        tools_of([run, schema])
    with pytest.raises(WrongResult, match=r"env mine \(.*Wanted: a list of tools"):
        tools_of("run")


def test_numbers_of_a_step_are_python_s_own() -> None:
    step = opened(StepResult(observation="o", reward=np.float32(0.5), done=np.bool_(True))).step(ACTION)  # type: ignore[arg-type]
    assert step == StepResult(observation="o", reward=0.5, done=True)


def test_observations_are_text_or_messages_and_content_parts_are_refused() -> None:
    env = opened(None)
    assert env.format_observation("hello") == [{"role": "user", "content": "hello"}]
    messages = [{"role": "tool", "content": "42"}]
    assert env.format_observation(messages) == messages
    for wrong in (None, 3, [], {"role": "user", "content": "x"}, [{"role": "user"}]):
        with pytest.raises(WrongResult, match=r"env mine \(.*\): format_observation returned"):
            env.format_observation(wrong)
    with pytest.raises(WrongResult, match=r"Wanted: text, or a list of parts: .*MediaSource"):
        env.format_observation([{"role": "user", "content": [{"type": "image", "image": "a.png"}]}])


def test_open_returns_an_env() -> None:
    with pytest.raises(WrongResult, match=r"<lambda> returned 'x' of type str\. Wanted: an object of a class"):
        opened("x", lambda came: came)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "none of messages, open and agent"),
        ({"messages": lambda row, config: [], "open": lambda start, config: None}, "both messages and open"),
        ({"open": lambda start, config: None}, "InteractionConfig"),
        ({"agent": lambda config: []}, "TurnsConfig"),
        ({"messages": lambda row, config: [], "state_keys": True}, "only an env with open gives any"),
    ],
)
def test_an_env_is_one_of_three_functions(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"env mine: .*{message}"):
        EnvSpec(name="mine", summary="s", config=EnvConfig, **given)


ROW = {"prompt": [{"role": "user", "content": "p"}], "answer": "a", "extra": {"board": [1, 2]}}


def changes(row: Any) -> list[Any]:
    """Changes a data row, like a careless plug-in, and returns the row's messages."""
    row["prompt"].append({"role": "assistant", "content": "x"})
    row["extra"]["board"].clear()
    row["new"] = 1
    messages: list[Any] = row["prompt"]
    return messages


def test_an_env_and_the_checks_of_rows_get_a_row_of_their_own() -> None:
    row = copy.deepcopy(ROW)
    one_turn = checked_env(
        EnvSpec(name="mine", summary="s", config=EnvConfig, messages=lambda row, config: changes(row))
    )
    several = checked_env(
        EnvSpec(
            name="mine",
            summary="s",
            config=InteractionConfig,
            open=lambda start, config: changes(start.row) and TurnsEnv("x"),
            tools=lambda row, config: changes(row) and [],
        )
    )
    checking = checked_reward(
        RewardSpec(
            name="mine",
            summary="s",
            config=RewardConfig,
            score=lambda given, config: 1.0,
            check_row=lambda row, config: changes(row) and None,
        )
    )
    assert one_turn.messages and several.open and several.tools and checking.check_row
    assert len(one_turn.messages(row, None)) == 2
    several.open(EpisodeStart(row=row, group_seed=0, episode_seed=0), None)
    several.tools(row, None)
    checking.check_row(row, None)
    assert row == ROW


class Judged(RewardInput):
    judges = "none"


def test_an_input_with_judges_keeps_them() -> None:
    def score(given: Any, config: Any) -> RewardOutput:
        changes(given.row)
        return RewardOutput(reward=1.0, why=given.judges)

    given = Judged(response="r", stopped=True, answer="a", row=copy.deepcopy(ROW))
    object.__setattr__(given, "judges", "asked")
    checked = checked_reward(RewardSpec(name="mine", summary="s", config=RewardConfig, score=score))
    assert checked.score and checked.score(given, None).why == "asked" and given.row == ROW  # type: ignore[union-attr]


class Stopping(BaseInteractionEnv):
    def reset(self) -> Any:
        sys.exit(1)

    async def step(self, action: Action) -> StepResult:
        raise asyncio.CancelledError

    def close(self) -> Any:
        sys.exit(2)


class StoppingRows(BaseDataSource):
    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> Any:
        sys.exit(number)

    def held_out(self) -> Any:
        raise BaseExceptionGroup("several", [SystemExit(1)])


def test_a_plugin_error_that_would_end_a_thread_is_an_exception_with_its_place() -> None:
    env_spec = EnvSpec(name="mine", summary="s", config=InteractionConfig, open=lambda start, config: Stopping())
    env = checked_env(env_spec).open(EpisodeStart(row={}, group_seed=0, episode_seed=0), None)  # type: ignore[misc]
    source_spec = DataSourceSpec(name="mine", summary="s", config=DataSourceConfig, open=lambda config: StoppingRows())
    source = checked_data_source(source_spec).open(None)
    action = Action(text="x", stopped=True)
    calls: list[Callable[[], Any]] = [
        env.reset,
        lambda: asyncio.run(env.step(action)),  # type: ignore[arg-type]
        env.close,
        lambda: source[1],
        source.held_out,
    ]
    for call in calls:
        with pytest.raises(PluginStopped, match=r"it raised (SystemExit|CancelledError|BaseExceptionGroup)"):
            call()


def test_a_signal_s_interrupt_passes_and_a_plug_in_s_own_does_not() -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        contained(interrupt)()
    with ThreadPoolExecutor(1) as pool, pytest.raises(PluginStopped, match="KeyboardInterrupt"):
        pool.submit(contained(interrupt)).result()


def test_a_child_of_a_plug_in_may_exit() -> None:
    def forks() -> int:
        child = os.fork()
        if not child:
            os._exit(7)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    contain_exits()
    assert contained(forks)() == 7
    with pytest.raises(PluginStopped, match=r"os\._exit\(3\)"):
        contained(lambda: os._exit(3))()
