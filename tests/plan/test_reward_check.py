"""Tests the reward check before a run: its report, its refusals, and its cached results."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.schema import RelaxConfig
from relax_core.data.sources import make_source
from relax_core.plan import reward_check
from relax_core.plan.data_check import summarize_data
from relax_core.plan.reward_check import RewardCheck, check_reward

LOOSE = """
from dataclasses import dataclass
from relax_core.contracts.reward import RewardConfig, RewardSpec

@dataclass(frozen=True)
class Config(RewardConfig):
    name: str = "loose"

SPEC = RewardSpec(name="loose", summary="for a test", config=Config,
    score=lambda given, config: float(given.answer in given.response))
"""


@pytest.fixture
def loose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "loose.py"
    path.write_text(LOOSE, encoding="utf-8")
    return str(path)


def config_of(*words: str) -> RelaxConfig:
    return load_config(["data=sums", "reward=plugin", *words])


def checked(config: RelaxConfig) -> RewardCheck:
    return check_reward(config, make_source(config.data, seed=config.seed, eval_rows=0))


def test_wrong_answers_that_the_reward_awards_are_named_before_the_start(loose: str) -> None:
    notes = summarize_data(config_of(f"reward.name={loose}")).notes
    assert "awards wrong answers" in notes[0] and "check-reward" in notes[0]
    assert any("digits around the label" in line or "all labels" in line for line in notes[1:])


def test_refuse_stops_the_start_and_off_does_not_look(loose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refused = summarize_data(config_of(f"reward.name={loose}", "reward.audit=refuse")).refused
    assert refused is not None and "reward.audit=refuse" in refused
    monkeypatch.setattr(reward_check, "audit_in_child", None)  # the test fails if a reward is called
    assert checked(config_of(f"reward.name={loose}", "reward.audit=off")) == RewardCheck()


def test_a_higher_limit_allows_a_family(loose: str) -> None:
    assert checked(config_of(f"reward.name={loose}", "reward.audit_limit=0.99")).notes  # families above 0.99
    assert checked(load_config(["data=sums", "reward=exact_match"])) == RewardCheck()


def test_the_result_is_kept_until_reward_or_rows_change(loose: str, monkeypatch: pytest.MonkeyPatch) -> None:
    first = checked(config_of(f"reward.name={loose}"))
    calls: list[int] = []
    real = reward_check.audit_in_child

    def counted(*given: object, **named: object) -> object:
        calls.append(1)
        return real(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(reward_check, "audit_in_child", counted)
    assert checked(config_of(f"reward.name={loose}", "reward.audit_limit=0.5")).notes and not calls
    assert checked(config_of(f"reward.name={loose}")) == first and not calls
    checked(config_of(f"reward.name={loose}", "seed=7"))
    assert len(calls) == 1, "other rows"
    Path(loose).write_text(LOOSE.replace("in given.response", "== given.response"), encoding="utf-8")
    checked(config_of(f"reward.name={loose}"))
    assert len(calls) == 2, "another reward"


def test_a_damaged_file_of_the_cache_is_written_again(loose: str, tmp_path: Path) -> None:
    first = checked(config_of(f"reward.name={loose}"))
    (file,) = (tmp_path / "cache" / "relax" / "audits").iterdir()
    assert file.stat().st_mode & 0o077 == 0 or file.parent.stat().st_mode & 0o077 == 0
    file.write_text("{", encoding="utf-8")
    assert checked(config_of(f"reward.name={loose}")) == first
    assert json.loads(file.read_text(encoding="utf-8"))["rows"] > 0


def test_a_reward_that_cannot_be_checked_is_not_passed(loose: str) -> None:
    Path(loose).write_text(LOOSE.replace("float(given.answer in given.response)", "0.0"), encoding="utf-8")
    (note,) = checked(config_of(f"reward.name={loose}", "reward.audit=refuse")).notes
    assert "cannot be checked" in note
    judged = load_config(["data=sums", "reward=remote", "reward.url=http://127.0.0.1:9/", "reward.audit=refuse"])
    (note,) = checked(judged).notes
    assert "remote" in note and "check-reward" in note


def test_a_shadow_that_can_judge_no_row_is_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"{n}?", "answer": f"x^{n}"}) + "\n" for n in range(40)))
    words = [
        "data=file",
        f"data.path={rows}",
        "reward=exact_match",
        "data.eval_size=4",
        "eval.rows=4",
        "model.task=arithmetic",
    ]
    refused = summarize_data(load_config([*words, "reward.shadow=final_answer"])).refused
    assert refused is not None and "reward.shadow=final_answer" in refused and "rows.jsonl" in refused
    assert summarize_data(load_config(words)).refused is None


def test_a_reward_that_crashes_ends_the_check_and_not_the_run(loose: str, tmp_path: Path) -> None:
    crash = LOOSE.replace(
        "float(given.answer in given.response)", "__import__('os').kill(__import__('os').getpid(), 9)"
    )
    Path(loose).write_text(crash, encoding="utf-8")
    (note,) = checked(config_of(f"reward.name={loose}")).notes
    assert "cannot be checked" in note
    assert not (tmp_path / "cache" / "relax" / "audits").exists(), "the next start tries again"


def test_a_reward_that_reads_no_label_is_not_passed(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps({"prompt": f"write {n}", "answer": f"word {n}"}) + "\n" for n in range(40)))
    words = ["data=file", f"data.path={rows}", "reward=format_think", "data.eval_size=0", "eval.every=0"]
    notes = summarize_data(load_config([*words, "model.task=arithmetic"])).notes
    assert any("label" in note and "not checked" in note for note in notes), notes
