"""Tests the output for a user's mistakes: the cause within one screen, an exit code, and nothing left behind."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relax_core.__main__ import main
from tests.integration.live_run import FinishedRun, run_to_end

pytestmark = pytest.mark.integration

SCREEN_LINES = 24
NO_EVAL = ("eval.every=0", "run.export_hf=false")
ROWS = [{"prompt": f"rev {number}", "answer": str(number)[::-1]} for number in range(10, 60)]
OWN_DATA = ("data=file", "reward=reverse_digits", "model.task=reverse_digits", "data.eval_size=8", *NO_EVAL)

REWARD = """
from dataclasses import dataclass

from relax_core.contracts.reward import RewardInput, RewardConfig, RewardOutput, RewardSpec


@dataclass(frozen=True)
class Config(RewardConfig):
    pass


def score(given: RewardInput, config: Config) -> float:
    print("scores", given.answer)
    if given.response == given.answer:  # as where plug-ins are tried, and hardly ever of an untrained model
        return 1.0
    return given.row["price"]


SPEC = RewardSpec(name="mine", summary="reads a key that is not there", config=Config, score=score)
"""


def assert_reported(run: FinishedRun, *words: str, code: int) -> None:
    """Checks only the last screen of output, because a slow machine prints more lines about the start."""
    assert run.code == code, run.output
    screen = "\n".join(run.output.splitlines()[-SCREEN_LINES:])
    for word in words:
        assert word in screen, run.output
    assert "Traceback" not in run.output, run.output


@pytest.fixture
def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., None]:
    """Returns a check: this process finds the mistake before anything starts, and creates no run folder."""

    def refuse(*overrides: str, words: tuple[str, ...], codes: tuple[int, ...] = (2,)) -> None:
        folder = tmp_path / "run"
        assert main([f"run.dir={folder}", "run.panel=false", *overrides]) in codes
        output = capsys.readouterr()
        told = output.err or output.out.split("\nModel ")[0]  # only the verdict, if there is a plan
        assert all(word in told for word in words), told
        assert "Traceback" not in told and len(told.splitlines()) <= SCREEN_LINES
        assert not folder.exists()

    return refuse


def failed(folder: Path, *overrides: str, words: tuple[str, ...]) -> FinishedRun:
    """Checks the failure of a started run and returns the run."""
    run = run_to_end(folder, "run.steps=4", *overrides)
    assert_reported(run, *words, code=1)
    assert run.summary.get("outcome", "failed").startswith("failed")
    return run


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


MISTAKES = [
    (["rollout.temprature=1"], ("rollout.temprature is not a key", "rollout.temperature")),
    (["run.steps=many"], ("run.steps", "many")),
    (
        ["modality=omni"],
        ("modality=omni does not exist", "modality=auto"),
    ),
    (["data=file", "data.path=/nowhere/rows.jsonl"], ("/nowhere/rows.jsonl: no such file",)),
    (["model=qwen3", "model.path=/nowhere"], ("model.path=/nowhere: no such folder",)),
    (["engine.max_total_tokens=1000000000000", "engine.max_running_samples=1000000000"], ("too little memory",)),
    (["engine.context_length=100000"], ("engine.context_length=100000", "4096 positions")),
    (["resume=/nowhere/step_00000010"], ("resume=/nowhere/step_00000010: no such folder",)),
    (["reward.name=/nowhere/mine.py"], ("/nowhere/mine.py: no such file",)),
    (
        ["model=tiny_qwen3_omni", "data=four_modalities", "data.task=tone_of_picture"],
        ("data.task=tone_of_picture with model.task=four_modalities", "Use model.task=tone_of_picture"),
    ),
]


@pytest.mark.parametrize(("overrides", "arguments"), MISTAKES)
def test_a_mistake_is_refused_before_anything_starts_and_by_the_plan(
    refused: Callable[..., None], overrides: list[str], arguments: tuple[str, ...]
) -> None:
    refused(*overrides, words=arguments)
    refused("plan=true", *overrides, words=arguments, codes=(1, 2))


def test_the_line_of_the_readme_names_what_the_machine_lacks_and_nothing_else(tmp_path: Path) -> None:
    run = run_to_end(tmp_path / "run", "algo=grpo", "model=qwen3_omni", "mode=async")
    assert run.code == 2 and not run.folder.exists(), run.output
    output = run.output.splitlines()
    assert output[0] == "relax: 3 problems in the configuration"
    assert [line.split()[1].partition("=")[0] for line in output[1:]] == ["data.path", "model.path", "placement.nodes"]


def test_a_malformed_line_is_named(refused: Callable[..., None], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", ROWS)
    lines = rows.read_text().splitlines()
    lines[6] = '{"prompt": "rev 1", "answer": '
    rows.write_text("\n".join(lines))
    words = ("1 of the 42 checked rows cannot be used", f"{rows}, line 7", "not a JSON object")
    refused(*OWN_DATA, f"data.path={rows}", "data.max_bad_rows=0.02", words=words)


def test_an_empty_data_set_is_named(refused: Callable[..., None], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [])
    refused(*OWN_DATA, f"data.path={rows}", words=(f"{rows}: it has no rows",))


def test_a_model_of_an_unknown_family_is_named(refused: Callable[..., None], tmp_path: Path) -> None:
    folder = tmp_path / "llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 64}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"\0" * 10)
    refused("model=qwen3", f"model.path={folder}", words=(str(folder), "llama", "qwen3"))


def test_a_port_in_use_is_named(refused: Callable[..., None], tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = (f"engine.port={port} cannot be used", "engine.port=0")
        refused(f"engine.port={port}", words=words)


def test_a_prompt_longer_than_the_context_is_named(refused: Callable[..., None], tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl", [{"prompt": "rev " + "1 2 3 4 " * 400, "answer": "1"}, *ROWS])
    words = ("checked prompts are longer than the 504 tokens that remain", f"{rows}, line 1 has 3212")
    on = (*OWN_DATA, f"data.path={rows}", "engine.context_length=512", "data.overlong=error")
    refused(*on, words=words)


def test_a_reward_that_raises_is_named_with_its_file_and_line_before_anything_starts(
    refused: Callable[..., None], tmp_path: Path
) -> None:
    plugin = tmp_path / "mine.py"
    plugin.write_text(REWARD.replace("given.response == given.answer", "False"))
    line = 1 + REWARD.splitlines().index('    return given.row["price"]')
    words = (f"reward.name={plugin}", f"KeyError: 'price' ({plugin}, line {line})", "None of the 3 rows")
    refused(f"reward.name={plugin}", *NO_EVAL, words=words)


@pytest.mark.parametrize("isolated", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_reward_that_fails_too_often_ends_the_run_with_the_first_cause(tmp_path: Path, isolated: bool) -> None:
    """The run's logs have the reward's output, and the metrics have the share of failures."""
    plugin = tmp_path / "mine.py"
    plugin.write_text(REWARD.replace("score=score)", f"score=score, isolated={isolated})"))
    line = 1 + REWARD.splitlines().index('    return given.row["price"]')
    cause = f"The first: KeyError: 'price' ({plugin}, line {line})"
    words = ("rollout-0 failed: RewardsFailed: ", "more than reward.max_failed=0.5", cause, "logs/failure.log")
    run = failed(tmp_path / "run", f"reward.name={plugin}", "rollout.prompts_per_step=2", *NO_EVAL, words=words)
    assert run.summary["ledger"]["trained"] == 0
    assert run.summary["ledger"]["dropped"]["reward_failed"] > 0
    assert "scores " in (run.folder / "logs" / ("reward.log" if isolated else "rollout-0.log")).read_text()
    assert "KeyError: 'price'" in (run.folder / "logs" / "rollout-0.log").read_text()
    records = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    shares = [record["values"]["reward_failed"] for record in records if record["source"] == "rollout"]
    assert shares and max(shares) > 0.5


def test_an_engine_that_cannot_start_is_named_with_its_last_words(tmp_path: Path) -> None:
    """The start timeout of the engine is too short."""
    limit = "engine.start_timeout_s=0.01"
    words = ("engine-0 failed: ", "embedded engine did not start: process", limit, "engine-0.log")
    failed(tmp_path / "run", limit, *NO_EVAL, words=words)


# -- checkpoints ------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yields a small file system with space for a few checkpoints. Only root may mount it."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no small file system could be mounted: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


@pytest.fixture(scope="module")
def full_disk_run(small_disk: Path) -> FinishedRun:
    """Returns a run. Its disk is full before the third or fourth checkpoint, for longer than the run waits."""
    settings = ("run.save_every=2", "run.keep_last=100", "run.steps=40", "run.stall_timeout_s=40", *NO_EVAL)
    return run_to_end(small_disk / "run", *settings)


def test_a_full_disk_is_told_and_the_old_checkpoints_stay(full_disk_run: FinishedRun) -> None:
    """On the full disk, either the checkpoint or the ledger fails first."""
    ledger_first = "actor-0 failed: LedgerUnwritable" in full_disk_run.output
    words = (
        ("the ledger could not be written", f"{full_disk_run.folder}/ledger.sqlite", "database or disk is full")
        if ledger_first
        else ("actor-0 failed: OSError", f"{full_disk_run.folder}/checkpoints/step_", "No space left on device")
    )
    assert_reported(full_disk_run, "relax: failed: actor-0 failed", *words, code=1)
    assert 2 in full_disk_run.checkpoints()
    assert not list((full_disk_run.folder / "checkpoints").glob(".*partial"))


def test_a_run_goes_on_from_the_newest_whole_checkpoint_before_the_disk_was_full(
    full_disk_run: FinishedRun, small_disk: Path
) -> None:
    """The newest checkpoint names a wrong step. The run skips this checkpoint, and the screen shows the reason."""
    subprocess.run(["mount", "-o", "remount,size=100m", small_disk], check=True)
    *_, whole, newest = full_disk_run.checkpoints()
    meta = full_disk_run.folder / "checkpoints" / f"step_{newest:08d}" / "meta.json"
    text = meta.read_text()
    assert f'"step": {newest},' in text
    meta.write_text(text.replace(f'"step": {newest},', f'"step": {newest + 50},'))
    settings = ("resume=auto", "run.save_every=0", f"run.steps={newest + 1}", *NO_EVAL)
    run = run_to_end(full_disk_run.folder, *settings)
    assert run.code == 0, run.output
    assert f"relax: resume: step_{newest:08d} is left: {meta} cannot be read: its digest does not agree" in run.output
    assert f"the run goes on from step_{whole:08d}" in run.output
    assert run.summary["steps"] == newest + 1
    assert run.summary["ledger"]["lost"] == run.summary["ledger"]["trained_twice"] == 0
    assert newest + 1 in run.checkpoints()


def test_a_corrupt_checkpoint_is_refused_with_what_else_there_is(
    refused: Callable[..., None], full_disk_run: FinishedRun, tmp_path: Path
) -> None:
    source = full_disk_run.folder / "checkpoints"
    newest = max(source.glob("step_*"))
    copies = tmp_path / "old" / "checkpoints"
    for folder in (source / "step_00000002", newest):
        shutil.copytree(folder, copies / folder.name)
    corrupt = copies / newest.name
    victim = max(corrupt.rglob("*.distcp"), key=lambda file: os.path.getsize(file))
    data = bytearray(victim.read_bytes())
    data[len(data) // 2] ^= 1
    victim.write_bytes(data)
    words = (f"checkpoint {corrupt}: {victim} is corrupt", f"resume={copies / 'step_00000002'}")
    refused(f"resume={corrupt}", words=words)
