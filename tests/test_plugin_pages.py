"""Tests that each page in docs/plugins/ contains the exact files of examples/plugins/, and that these files work."""

from __future__ import annotations

import dataclasses
import io
import re
import subprocess
import sys
import wave
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.contracts.env import Action, EpisodeStart, StepResult, media_sources
from relax_core.contracts.reward import RewardInput
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.tool_parsers import read_action
from relax_core.preflight import plugin_problems
from relax_core.registry import ALL_KINDS, PluginError, find, find_algorithm, find_env, find_reward, key_of
from tests.data.test_plugin_source import ROWS, write_database
from tests.media_items import TOWER

REPOSITORY = Path(__file__).resolve().parents[1]
PAGES = REPOSITORY / "docs" / "plugins"
EXAMPLES = REPOSITORY / "examples" / "plugins"
SHOWN = re.compile(r"^`examples/plugins/([\w.]+)`:\n\n```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TASK_PAGES = sorted(page for page in PAGES.glob("*.md") if page.name != "README.md")


@pytest.mark.parametrize("page", TASK_PAGES, ids=lambda page: page.stem)
def test_a_page_shows_its_files_whole(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = dict(SHOWN.findall(text))
    assert shown, f"{page.name} shows no file"
    for name, code in shown.items():
        assert code == (EXAMPLES / name).read_text(encoding="utf-8"), f"{page.name} and {name} differ"
    for heading in ("How to run it", "What is checked"):
        assert f"\n## {heading}\n" in text
    assert f"]({page.name})" in (PAGES / "README.md").read_text(encoding="utf-8")


def test_every_file_is_on_a_page_and_is_a_plugin() -> None:
    shown = {name for page in TASK_PAGES for name, _ in SHOWN.findall(page.read_text(encoding="utf-8"))}
    assert {file.name for file in EXAMPLES.iterdir() if file.is_file()} == shown
    for file in EXAMPLES.glob("*.py"):
        assert len(list(_kinds_of(file))) == 1, file


def _kinds_of(file: Path) -> list[str]:
    found = []
    for kind in ALL_KINDS:
        try:
            found.append(find(kind, str(file)).name)
        except PluginError:
            continue
    return found


def test_every_kind_has_a_page_that_names_its_key() -> None:
    pages = "".join(page.read_text(encoding="utf-8") for page in TASK_PAGES)
    assert all(f"{key_of(kind)}=" in pages for kind in ALL_KINDS)


def test_the_files_pass_the_trial_before_a_start_together(tmp_path: Path) -> None:
    words = (
        *(f"algo.name={EXAMPLES}/quantile_baseline.py", f"reward.name={EXAMPLES}/length.py"),
        *(f"env.name={EXAMPLES}/polite.py", f"data.name={EXAMPLES}/sqlite_source.py"),
        f"data.config.database={write_database(tmp_path / 'rows.db', ROWS)}",
        *("model.task=reverse_digits", "data.eval_size=8", "eval.rows=8"),
    )
    assert plugin_problems(load_config(words)) == []
    turns = ("reward=env", "eval.every=0", "engine.context_length=192")
    assert plugin_problems(load_config([f"env.name={EXAMPLES}/until_right.py", *turns])) == []


def test_reward() -> None:
    file = f"{EXAMPLES}/length.py"
    config = load_config([f"reward.name={file}", "reward.target=3"]).reward
    score: Any = find_reward(file).score
    given = [RewardInput(response=text, stopped=True, answer="", row={}) for text in ("abc", "abcd")]
    assert [score(reward_input, config).reward for reward_input in given] == [1.0, 0.0]
    with pytest.raises(ConfigError, match=r"reward.target=0: an answer has at least one character"):
        load_config([f"reward.name={file}", "reward.target=0"])


def test_env() -> None:
    file = f"{EXAMPLES}/polite.py"
    config = load_config([f"env.name={file}", 'env.system="Be brief."']).env
    messages: Any = find_env(file).messages
    opened = messages({"prompt": "1 + 1?"}, config)
    assert [message["content"] for message in opened] == ["Be brief.", "1 + 1?"]


def test_an_env_shows_a_sound_as_a_picture(tmp_path: Path) -> None:
    """A tone that rises in four steps rises in the picture, too. The encode worker accepts the picture."""
    rate, steps = 8000, (500, 1000, 2000, 3000)
    seconds = np.arange(rate // 2) / rate
    sound = np.concatenate([0.5 * np.sin(2 * np.pi * hertz * seconds) for hertz in steps])
    with wave.open(str(tmp_path / "a.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes((sound * 32767).astype("<i2").tobytes())
    spec = find_env(f"{EXAMPLES}/spectrogram.py")
    config = load_config([f"env.name={EXAMPLES}/spectrogram.py", f"env.folder={tmp_path}"]).env
    opened: Any = spec.messages
    (message,) = opened({"prompt": "what is it?", "sound": "a.wav"}, config)
    (source,) = media_sources([message])
    pixels = np.asarray(Image.open(io.BytesIO(source.data)))
    assert pixels.shape[0] == 256 and pixels.dtype == np.uint8
    columns = [pixels.shape[1] * (2 * step + 1) // 8 for step in range(4)]
    loudest = [255 - int(pixels[:, column].argmax()) for column in columns]  # row from the bottom; 15.6 Hz per row
    assert loudest == [pytest.approx(hertz / 15.625 - 1, abs=1) for hertz in steps]
    tower = dataclasses.replace(TOWER, min_pixels=64)
    item, tensors = encode_item(source, tower, MediaLimits(), root=tmp_path, tokenize=lambda text: [])
    assert item.description == f"[image {pixels.shape[1]}×256]" and tensors["frames"].shape[3] == 3
    with pytest.raises(FileNotFoundError):
        opened({"prompt": "what is it?", "sound": "b.wav"}, config)


def test_env_with_turns() -> None:
    file = f"{EXAMPLES}/until_right.py"
    keys = [f"env.name={file}", 'env.hint="no"', "reward=env", "eval.every=0", "engine.context_length=192"]
    config = load_config(keys)
    start = EpisodeStart(row={"prompt": "1 + 1?", "answer": "2"}, group_seed=0, episode_seed=0)
    opener: Any = find_env(file).open
    opened = opener(start, config.env)
    assert opened.format_observation(opened.reset()) == [{"role": "user", "content": "1 + 1?"}]
    assert opened.step(Action(text="3", stopped=True)) == StepResult(observation="no", reward=0.0)
    assert opened.step(Action(text="2", stopped=True)).done


def test_env_with_a_tool() -> None:
    file = f"{EXAMPLES}/phone_book.py"
    spec, row = find_env(file), {"prompt": "", "answer": ""}
    config = spec.config(name="phone_book")
    tools: Any = spec.tools
    (schema,) = tools(row, config)
    parameters = schema["function"].pop("parameters")
    assert schema["function"] == {"name": "look_up", "description": "Returns the phone number of a person."}
    assert parameters["properties"] == {"person": {"type": "string", "description": "a first name"}}
    opener: Any = spec.open
    opened = opener(EpisodeStart(row=row, group_seed=1, episode_seed=0), config)
    person = re.findall(r"of (\w+)\?", opened.reset())[0]
    call = '<tool_call>{"name": "look_up", "arguments": {"person": "PERSON"}}</tool_call>'.replace("PERSON", person)
    step = opened.step(read_action(call, stopped=True, parser="hermes", tools=tools(row, config)))
    ((message,), done) = opened.format_observation(step.observation), step.done
    assert message["role"] == "tool" and not done
    last = opened.step(read_action(f"It is {message['content']}.", stopped=True, parser="hermes"))
    assert last == StepResult(reward=1.0, done=True)
    (mistake,) = opened.step(read_action(call.replace("look_up", "dial"), stopped=True, parser="hermes")).observation
    assert mistake["content"] == "There is no tool 'dial'. The tools are: look_up."


def test_algorithm() -> None:
    """Compares with values computed by hand. The quartile of 0, 1, 3, 4 is 0.75. At a ratio of 1 the loss is the
    negative sum of trained advantages. A ratio above 1.2 is clipped to 1.2 if the advantage is positive.
    """
    import torch

    from relax_core.contracts.algorithm import AdvantageInputs, LossInputs, StepTotals

    file = f"{EXAMPLES}/quantile_baseline.py"
    config = load_config([f"algo.name={file}", "algo.quantile=0.25", "algo.clip_high=0.2"]).algo
    spec = find_algorithm(file)
    sample_ids = torch.tensor([0, 0, 1, 2, 3])
    mask = torch.tensor([True, False, True, True, True])
    inputs = AdvantageInputs(
        rewards=torch.tensor([0.0, 1.0, 3.0, 4.0]),
        lengths=torch.tensor([2, 1, 1, 1]),
        loss_mask=mask,
        sample_ids=sample_ids,
    )
    advantages = spec.advantages(inputs, config)
    assert advantages.tolist() == [-0.75, -0.75, 0.25, 2.25, 3.25]
    old = torch.tensor([-1.0, -2.0, -3.0, -1.0, -1.0])
    for moved, expected in ((0.0, -(-0.75 + 0.25 + 2.25 + 3.25)), (1.0, -(-0.75 + 0.25 + 2.25 + 1.2 * 3.25))):
        logprobs = (old + torch.tensor([0.0, 0.0, 0.0, 0.0, moved])).requires_grad_()
        outputs = spec.loss(
            LossInputs(
                logprobs=logprobs,
                old_logprobs=old,
                rollout_logprobs=old,
                advantages=advantages,
                loss_mask=mask,
                sample_ids=sample_ids,
                num_samples=4,
            ),
            config,
        )
        assert outputs.loss_sum.item() == pytest.approx(expected, rel=1e-6)
    assert spec.denominator(StepTotals(tokens=4, samples=4, groups=1), config) == 4.0
    with pytest.raises(ConfigError, match=r"algo.quantile=2.0: a quantile lies between 0 and 1"):
        load_config([f"algo.name={file}", "algo.quantile=2"])


def test_the_public_parts_are_relaxs_own_whatever_the_project_has(tmp_path: Path) -> None:
    """A plug-in in a project with packages of the same names imports Relax's packages, never the project's."""
    for package in ("algorithms", "algorithms/functional", "algorithms/policy_gradient", "rewards", "envs"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text("raise SystemExit('of the project')\n")
    (tmp_path / "algorithms" / "mine.py").write_text((EXAMPLES / "quantile_baseline.py").read_text())
    words = ("plan=true", "algo.name=algorithms/mine.py", "algo.quantile=0.25")
    for command in ([sys.executable, "-m", "relax_core"], [str(Path(sys.executable).with_name("relax"))]):
        planned = subprocess.run([*command, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert planned.returncode == 0 and "can start." in planned.stdout, planned.stdout + planned.stderr
