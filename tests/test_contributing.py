"""The examples in CONTRIBUTING.md are true: each is loaded as a plug-in file and used."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.env import Action, EpisodeStart, StepResult
from relax_core.contracts.reward import RewardInput
from relax_core.registry import find_algorithm, find_env, find_reward

TEXT = (Path(__file__).resolve().parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXAMPLES = dict(re.findall(r"`(\w+/\w+\.py)`:\n\n```python\n(.*?)```", TEXT, re.DOTALL))


@pytest.fixture
def example(tmp_path: Path, request: pytest.FixtureRequest) -> str:
    file = tmp_path / Path(request.param).name
    file.write_text(EXAMPLES[request.param])
    return str(file)


@pytest.mark.parametrize("example", ["rewards/length.py"], indirect=True)
def test_reward(example: str) -> None:
    config = load_config([f"reward.name={example}", "reward.target=3"]).reward
    score = find_reward(example).score
    given = [RewardInput(response=text, stopped=True, answer="", row={}) for text in ("abc", "abcd")]
    assert [score(one, config).reward for one in given] == [1.0, 0.0]


@pytest.mark.parametrize("example", ["envs/polite.py"], indirect=True)
def test_env(example: str) -> None:
    config = load_config([f"env.name={example}", 'env.system="Be brief."']).env
    opened = find_env(example).messages({"prompt": "1 + 1?"}, config)
    assert [message["content"] for message in opened] == ["Be brief.", "1 + 1?"]


@pytest.mark.parametrize("example", ["envs/until_right.py"], indirect=True)
def test_env_with_turns(example: str) -> None:
    keys = [f"env.name={example}", 'env.hint="no"', "reward=env", "eval.every=0", "engine.context_length=192"]
    config = load_config(keys)
    start = EpisodeStart(row={"prompt": "1 + 1?", "answer": "2"}, group_seed=0, episode_seed=0)
    opened = find_env(example).open(start, config.env)
    assert opened.format_observation(opened.reset()) == [{"role": "user", "content": "1 + 1?"}]
    assert opened.step(Action(text="3", stopped=True)) == StepResult(observation="no", reward=0.0)
    assert opened.step(Action(text="2", stopped=True)).done


@pytest.mark.parametrize("example", ["algorithms/reinforce.py"], indirect=True)
def test_algorithm(example: str) -> None:
    import torch

    from relax_core.contracts.algorithm import AdvantageInputs, LossInputs, StepTotals

    config = load_config([f"algo.name={example}", "mode=colocate"]).algo
    spec = find_algorithm(example)
    sample_ids = torch.tensor([0, 0, 1])
    mask = torch.tensor([True, False, True])
    advantages = spec.advantages(
        AdvantageInputs(
            rewards=torch.tensor([1.0, 0.0]), lengths=torch.tensor([2, 1]), loss_mask=mask, sample_ids=sample_ids
        ),
        config,
    )
    assert advantages.tolist() == [0.5, 0.5, -0.5]
    logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    outputs = spec.loss(
        LossInputs(
            logprobs=logprobs,
            old_logprobs=logprobs.detach(),
            rollout_logprobs=logprobs.detach(),
            advantages=advantages,
            loss_mask=mask,
            sample_ids=sample_ids,
            num_samples=2,
        ),
        config,
    )
    assert outputs.loss_sum.item() == -(-1.0 * 0.5 + -3.0 * -0.5)
    assert spec.denominator(StepTotals(tokens=2, samples=2, groups=1), config) == 2.0


def test_all_examples_are_used() -> None:
    assert set(EXAMPLES) == {
        "rewards/length.py",
        "envs/polite.py",
        "envs/until_right.py",
        "algorithms/reinforce.py",
    }
