"""The adapter against the real package gymnasium."""

from __future__ import annotations

import pytest

pytest.importorskip("gymnasium", reason="pip install 'relax-core[envs]'")

from envs.gymnasium import GymnasiumConfig, GymnasiumEnv, check
from relax_core.contracts.env import Action, EpisodeStart, StepResult
from relax_core.tools.check_env import main

LAKE = GymnasiumConfig(arguments={"is_slippery": False}, actions=["left", "down", "right", "up"])


def opened(config: GymnasiumConfig, *, group: int = 5, episode: int = 6) -> tuple[GymnasiumEnv, str]:
    env = GymnasiumEnv(EpisodeStart(row={}, group_seed=group, episode_seed=episode), config)
    return env, env.reset()


def say(env: GymnasiumEnv, text: str) -> StepResult:
    return env.step(Action(text=text, content=text, stopped=True))


def test_the_frozen_lake_is_crossed_with_words() -> None:
    env, opening = opened(LAKE)
    assert opening == "[S]FFF\nFHFH\nFFFH\nHFFG\nAnswer with one of: left, down, right, up"
    told = say(env, "I fly")
    assert told.reward is None and not told.done and "no action in your answer" in told.observation
    first = say(env, "not right, DOWN!")
    assert first == StepResult(
        observation="  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG", reward=0.0, info={"truncated": 0}, state_key="0"
    )
    steps = [say(env, word) for word in ("down", "right", "right", "down", "right")]
    assert [step.done for step in steps] == [False] * 4 + [True]
    assert [step.reward for step in steps] == [0.0] * 4 + [1.0]
    assert steps[-1].state_key == "14"
    env.close()


def test_a_hole_ends_the_episode_without_reward() -> None:
    env, _ = opened(LAKE)
    say(env, "right")
    assert say(env, "down").done


def test_a_group_opens_alike_and_its_episodes_have_their_own_luck() -> None:
    blackjack = GymnasiumConfig(id="Blackjack-v1")
    openings = {opened(blackjack, group=1, episode=episode)[1] for episode in range(5)}
    assert len(openings) == 1
    assert len({opened(blackjack, group=group)[1] for group in range(20)}) > 5

    def cards(episode: int) -> list[str]:
        env, _ = opened(blackjack, group=1, episode=episode)
        return [say(env, "1").observation for _ in range(1)]

    assert cards(3) == cards(3) and len({str(cards(episode)) for episode in range(20)}) > 3


def test_what_does_not_exist_or_has_no_numbered_actions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.id=Nowhere-v1: Environment `Nowhere` doesn't exist"):
        check(GymnasiumConfig(id="Nowhere-v1"))
    with pytest.raises(ValueError, match="numbered ones alone"):
        opened(GymnasiumConfig(id="Pendulum-v1"))
    with pytest.raises(ValueError, match=r"env\.actions has 1 names, but env\.id=FrozenLake-v1 has 4 actions"):
        opened(GymnasiumConfig(actions=["left"]))


def test_it_passes_the_check_in_its_worker_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gymnasium", "max_turns=4"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
