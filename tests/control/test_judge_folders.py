"""Judges that cannot work are refused before anything starts, with key, value and fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.control.model_folders import judge_folders, judge_problems
from relax_core.plan.build_plan import as_text, make_plan
from relax_core.plan.data_check import look_at_data
from relax_core.plan.memory_plan import judge_holders
from relax_core.roles.process_placement import roles_of
from relax_core.tools.make_tiny import tiny_model_folder


@pytest.fixture(scope="module")
def model() -> Path:
    return tiny_model_folder("tiny_qwen3", task="reverse_digits")


@pytest.fixture
def prompt(tmp_path: Path) -> Path:
    file = tmp_path / "prompt.jinja"
    file.write_text("{{ response }}")
    return file


def config_of(prompt: Path, *overrides: str) -> RelaxConfig:
    return load_config(["reward=genrm", f"reward.judges.main.prompt={prompt}", *overrides])


def test_judges_have_engines_and_memory_of_their_own(model: Path, prompt: Path) -> None:
    config = config_of(prompt, "reward.judges.main.model=tiny_qwen3", "reward.judges.main.count=2")
    assert list(judge_problems(config)) == []
    assert judge_folders(config) == {"main": model}
    assert roles_of(config)["judge_engine"] == 2
    (holder,) = judge_holders(config)
    assert (holder.name, holder.count) == ("judge main", 2)
    weights = sum(file.stat().st_size for file in model.glob("*.safetensors"))
    assert holder.peak.terms["weights"] == pytest.approx(weights, rel=0.05)
    plan = make_plan(config)
    assert plan.roles["judge_engine"] == 2 and holder in plan.memory and "judge main" in as_text(plan)
    remote = config_of(prompt, "reward.judges.main.model=m", "reward.judges.main.url=http://127.0.0.1:1/v1")
    assert "judge_engine" not in roles_of(remote) and judge_holders(remote) == []
    assert "judge_engine" not in roles_of(load_config())


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("reward.judges.main.model=/nowhere",), "reward.judges.main.model=/nowhere: no such folder"),
        (("reward.judges.main.model={model}", "reward.judges.main.engine=x"), "reward.judges.main.engine: engine"),
        (("reward.judges.main.model={model}", "reward.judges.main.prompt=/no.jinja"), "reward.judges.main.prompt: /no"),
        (("reward.judges.main.model={model}", "reward.judges.main.parse=x"), "reward.judges.main.parse: 'x' has no"),
        (("reward.judges.main.model={model}", "reward.route=kind"), "reward.route=kind: data=reverse_digits has only"),
        (("reward.judges.main.model={model}", "reward.check.path=/no"), "reward.check.path=/no cannot be read"),
        (
            ("reward.judges.main.model={model}", "reward.judges.main.max_new_tokens=100000"),
            "its prompt template alone has",
        ),
        (
            ("reward.judges.main.model=m", "reward.judges.main.url=http://h/v1", "reward.judges.main.token_file=/no"),
            "reward.judges.main.token_file=/no: no such file",
        ),
    ],
)
def test_what_cannot_work_is_told(model: Path, prompt: Path, overrides: tuple[str, ...], words: str) -> None:
    found = list(judge_problems(config_of(prompt, *(one.format(model=model) for one in overrides))))
    assert len(found) == 1 and words in found[0], found


def test_a_row_with_an_unknown_judge_is_named_with_its_line(model: Path, prompt: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    rows = [{"prompt": "1", "answer": "1", "judge": judge} for judge in ("main", "mian")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = config_of(
        prompt,
        f"reward.judges.main.model={model}",
        "reward.route=judge",
        "data=file",
        f"data.path={file}",
        "data.eval_size=0",
        "eval.every=0",
        "model.task=arithmetic",
    )
    refused = look_at_data(config).refused
    assert refused is not None and f"{file}, line 2: " in refused
    assert "judge='mian' is none of the judges: main" in refused
