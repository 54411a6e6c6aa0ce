"""Tests that a run can be repeated from its folder, with overrides."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from launchers.local import save_config
from launchers.sweep import Sweep
from relax_core.config.compose import load_config, run
from relax_core.config.errors import ConfigError
from relax_core.config.rerun import rerun_line
from relax_core.config.saved_config import plain
from relax_core.config.schema import FolderByTime, RelaxConfig

ANOTHER = (
    *("algo=ppo", "algo.clip_high=0.3", "mode=colocate", "optimizer.lr=3e-4", "data=arithmetic", "reward=math"),
    *("engine.context_length=128", "parallel=dp2", "seed=7", "run.steps=11", "resume=auto"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "a=b"
    made.mkdir()
    save_config(load_config([*ANOTHER, f"run.dir={made}"]), made)
    return made


def repeated(*words: str) -> RelaxConfig:
    seen: list[RelaxConfig] = []

    def job(config: RelaxConfig) -> int:
        seen.append(config)
        return 0

    assert run(rerun_line(words), job) == 0
    (config,) = seen
    return config


def test_a_run_is_repeated_with_its_own_values_in_a_new_folder(folder: Path) -> None:
    config = repeated(str(folder))
    saved = yaml.safe_load((folder / "config.yaml").read_text())
    assert isinstance(config.run.dir, FolderByTime) and config.run.dir != str(folder)
    assert config.resume is None
    again = plain(config)
    again["run"]["dir"], again["resume"] = saved["run"]["dir"], saved["resume"]
    assert again == saved


def test_new_overrides_win_and_a_new_group_choice_drops_old_values(folder: Path) -> None:
    config = repeated(str(folder), "algo=grpo", "mode=async", "seed=9", "run.dir=/somewhere/new=er")
    assert (config.algo.name, config.algo.clip_high, config.algo.epochs) == ("grpo", 0.2, 1)
    assert (config.mode.max_staleness, config.seed, config.run.dir) == (1, 9, "/somewhere/new=er")
    assert (config.optimizer.lr, config.run.steps, config.parallel.dp) == (3e-4, 11, 2)
    assert config.name == "tiny_qwen3-arithmetic"
    changed = repeated(str(folder), "algo.name=rloo", "data=reverse_digits", "reward=reverse_digits")
    assert (changed.algo.name, changed.name) == ("rloo", "tiny_qwen3-reverse_digits")


def test_a_sweep_starts_from_a_run(folder: Path, tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []

    def job(config: RelaxConfig) -> int:
        seen.append((config.seed, config.optimizer.lr))
        return 0

    overrides = [
        str(folder),
        "-m",
        f"hydra.sweep.dir={tmp_path}/sweep",
        f"run.dir={tmp_path}/runs/${{seed}}",
        "seed=1,2",
    ]
    assert run(rerun_line(overrides), job, sweep=Sweep(job)) == 0
    assert seen == [(1, 3e-4), (2, 3e-4)]


def test_a_plugin_file_and_a_launcher_of_the_saved_run_stay(tmp_path: Path) -> None:
    plugin = tmp_path / "mine.py"
    text = (Path(__file__).parents[2] / "rewards" / "math.py").read_text()
    plugin.write_text(text.replace("rule: str =", "target: int = 3\n    rule: str ="))
    made = tmp_path / "run"
    made.mkdir()
    lines = (
        f"reward.name={plugin}",
        "reward.target=4",
        "launcher=slurm",
        "launcher.max_requeues=5",
        "launcher.nodes=2",
    )
    save_config(load_config(lines), made)
    config = repeated(str(made))
    assert (config.reward.name, config.reward.target) == (str(plugin), 4)
    assert (config.launcher.name.value, config.launcher.nodes) == ("slurm", 2)
    assert repeated(str(made), "launcher=local").launcher.name.value == "local"


def test_what_cannot_be_repeated_is_said(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def told(*words: str) -> str:
        with pytest.raises(ConfigError) as caught:
            rerun_line(words)
        return caught.value.problems[0]

    assert told() == told("seed=1") == "relax rerun RUN [--trust] [key=value ...], where RUN is a run's folder."
    assert told(str(tmp_path)).startswith(f"{tmp_path}: it has no config.yaml.")
    assert told(str(folder), "experiment=math_file").startswith("experiment=math_file: ")
    file = folder / "config.yaml"
    text = file.read_text()
    file.write_text("- 1\n")
    assert told(str(folder)).startswith(f"{file} is not the configuration of a run.")
    file.write_text("a: [1\n")
    assert told(str(folder)).startswith(f"{file}: not valid YAML")
    file.write_text(text.replace("clip_grad:", "clip_gradient:"))  # as if another version of Relax had written it
    assert run(rerun_line([str(folder)]), lambda config: pytest.fail("it started")) == 2
    assert "in the run's config.yaml: optimizer.clip_gradient is not a key." in capsys.readouterr().err
    file.write_text(text.replace("urls: []", "urls: ['http://<redacted>@host:1']"))
    assert told(str(folder)) == f"engine.urls is a secret that {file} does not hold. Add engine.urls=..."


def test_keys_that_are_gone_are_left_out(folder: Path) -> None:
    file = folder / "config.yaml"
    text = file.read_text().replace("\nbus:\n", "\nbus:\n  lease_s: 600.0\n")
    file.write_text(text.replace("\nparallel:\n", "\nparallel:\n  reference:\n    tp: 2\n"))
    assert repeated(str(folder)).bus.name == "ray"
