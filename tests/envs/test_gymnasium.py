"""Tests the adapter with the real package gymnasium."""

from __future__ import annotations

import json
from pathlib import Path

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


MODULE = """
import gymnasium as gym, numpy as np

class Big(gym.Env):
    metadata = {"render_modes": []}
    observation_space = gym.spaces.Dict({"grid": gym.spaces.Box(0, 9, (40, 40)), "n": gym.spaces.Discrete(5),
        "pair": gym.spaces.Tuple([gym.spaces.Box(0, 1, ()), gym.spaces.MultiBinary(())])})
    action_space = gym.spaces.Discrete(3, start=-1)
    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self.seen(), {}
    def seen(self):
        grid = np.zeros((40, 40), np.float32)
        grid[20, self.t] = 0.1
        return {"grid": grid, "n": np.int64(self.t), "pair": (np.float32(0.5), np.bool_(True))}
    def step(self, action):
        self.t += 1
        return self.seen(), float(action), self.t > 3, False, {}

gym.register("Big-v0", entry_point=Big)
"""


def test_arrays_are_written_whole_and_are_states_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "big_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = GymnasiumConfig(id="big_module:Big-v0")
    check(config)
    env, opening = opened(config)
    first, second = say(env, "-1"), say(env, "I take 1.")
    assert (first.reward, second.reward) == (-1.0, 1.0)
    assert first.state_key != second.state_key and len(str(first.state_key)) == 64
    seen = json.loads(first.observation)
    assert len(seen["grid"]) == len(seen["grid"][20]) == 40 and seen["grid"][20][1] == 0.1
    assert (seen["n"], seen["pair"]) == (1, [0.5, True]) and "..." not in opening
    for module, words in (("no_such_module", "No module"), ("broken_module", "ZeroDivisionError")):
        (tmp_path / "broken_module.py").write_text("1 / 0")
        with pytest.raises(ValueError, match=rf"env\.id={module}:Big-v0: .*{words}"):
            check(GymnasiumConfig(id=f"{module}:Big-v0"))


@pytest.mark.parametrize(
    ("text", "action"),
    [("-1", ""), ("−1", ""), ("+1", ""), ("1.5", ""), ("2.1", ""), ("2.", "2"), ("move (1)", "1"), ("1, no 3", "3")],
)
def test_a_number_is_an_action_only_as_a_whole(text: str, action: str) -> None:
    env, _ = opened(GymnasiumConfig(arguments={"is_slippery": False}))
    names = {"1": "(Down)", "2": "(Right)", "3": "(Up)", "": "no action"}
    assert names[action] in say(env, text).observation


def test_what_does_not_exist_or_has_no_numbered_actions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"env\.id=Nowhere-v1: Environment `Nowhere` doesn't exist"):
        check(GymnasiumConfig(id="Nowhere-v1"))
    with pytest.raises(ValueError, match="Only numbered actions are supported"):
        opened(GymnasiumConfig(id="Pendulum-v1"))
    with pytest.raises(ValueError, match=r"env\.actions has 1 names, but env\.id=FrozenLake-v1 has 4 actions"):
        opened(GymnasiumConfig(actions=["left"]))


def test_it_passes_the_check_in_its_worker_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gymnasium", "max_turns=4"]) == 0
    assert "nothing is wrong" in capsys.readouterr().out
