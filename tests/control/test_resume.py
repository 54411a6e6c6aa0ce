"""Tests the choice of the checkpoint for a resume, and refused checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from relax_core.config.compose import load_config
from relax_core.config.model_checks import DTYPES
from relax_core.config.saved_config import plain, to_yaml
from relax_core.config.schema import RelaxConfig
from relax_core.control.resume import ResumePoint, find_resume_point
from relax_core.data.data_identity import data_digest
from relax_core.plan.plan_command import show_plan
from relax_core.preflight import settle
from relax_core.train.checkpoints.checkpoint_store import DATA_DIGEST, DATUM, META, TOKEN_TREE, CheckpointStore
from tests.data.test_plugin_source import ROWS, SQLITE, write_database

STEPS = 100


@pytest.fixture
def config(tmp_path: Path) -> RelaxConfig:
    return load_config([f"run.dir={tmp_path / 'run'}", f"run.steps={STEPS}"])


def write_checkpoint(
    run: Path,
    step: int,
    *,
    snapshot: bytes = b"cut",
    config: RelaxConfig | None = None,
    digest: str | None = None,
    token_tree: bool = True,
) -> Path:
    def write(folder: Path) -> None:
        (folder / "config.yaml").write_text(to_yaml(config or load_config([])))
        (folder / "bus.msgpack").write_bytes(snapshot)
        (folder / "train").mkdir()
        (folder / "train" / "weights").write_bytes(b"w" * 100)

    meta = ({DATUM: TOKEN_TREE} if token_tree else {}) | ({} if digest is None else {DATA_DIGEST: digest})
    return CheckpointStore(run / "checkpoints", keep_last=5).write(step, writers=write, meta=meta)


def test_null_starts_afresh_whatever_is_there(config: RelaxConfig) -> None:
    write_checkpoint(Path(config.run.dir), 10)
    assert find_resume_point(config) is None


def test_auto_without_a_checkpoint_starts_afresh(config: RelaxConfig) -> None:
    assert find_resume_point(replace(config, resume="auto")) is None


def test_auto_takes_the_newest(config: RelaxConfig) -> None:
    write_checkpoint(Path(config.run.dir), 10, snapshot=b"old")
    newest = write_checkpoint(Path(config.run.dir), 20, snapshot=b"new")
    point = find_resume_point(replace(config, resume="auto"))
    assert point is not None
    assert (point.folder, point.step, point.snapshot) == (newest, 20, b"new")


def test_auto_finds_one_whose_replacement_was_cut_short(config: RelaxConfig) -> None:
    folder = write_checkpoint(Path(config.run.dir), 10)
    folder.rename(folder.with_name(f".{folder.name}.replaced"))
    point = find_resume_point(replace(config, resume="auto"))
    assert point is not None and (point.folder, point.step) == (folder, 10)


def test_a_plan_shows_what_a_resume_changes_and_repairs_nothing(
    config: RelaxConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = [f"run.dir={tmp_path / 'run'}", "resume=auto", "plan=true"]
    folder = write_checkpoint(tmp_path / "run", 10, config=config)
    assert show_plan(load_config([*own, f"run.steps={STEPS}", "optimizer.lr=1e-5"]), []) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert f"resume: {folder}, step 10" in printed and "optimizer.lr was 0.0008, is 1e-05" in printed
    assert show_plan(load_config([*own, "run.steps=5"]), []) == 1
    assert "run.steps=5" in capsys.readouterr().err
    folder.rename(replaced := folder.with_name(f".{folder.name}.replaced"))
    assert show_plan(load_config([*own, f"run.steps={STEPS}"]), []) == 0
    assert replaced.is_dir() and "resume:" not in capsys.readouterr().out


def test_a_named_folder_counts_even_if_it_is_not_the_newest(config: RelaxConfig, tmp_path: Path) -> None:
    older = write_checkpoint(tmp_path / "other", 10, snapshot=b"old")
    write_checkpoint(tmp_path / "other", 20)
    point = find_resume_point(replace(config, resume=str(older)))
    assert point is not None and (point.folder, point.step, point.snapshot) == (older, 10, b"old")


def test_all_steps_done_may_be_resumed_and_more_may_not(config: RelaxConfig) -> None:
    folder = write_checkpoint(Path(config.run.dir), STEPS)
    assert find_resume_point(replace(config, resume="auto")) is not None
    folder = write_checkpoint(Path(config.run.dir), STEPS + 1)
    with pytest.raises(ValueError, match=rf"{folder}: it holds 101 train steps, but run.steps=100. Raise run.steps"):
        find_resume_point(replace(config, resume="auto"))


def damage(file: Path, harm: str) -> None:
    """Damages a checkpoint: flips a bit, truncates a file to half, removes a file, or changes a digit of the step."""
    data = file.read_bytes()
    if harm == "remove":
        file.unlink()
    elif harm == "another step":
        assert data.count(b'"step": 20') == 1
        file.write_bytes(data.replace(b'"step": 20', b'"step": 21'))
    else:
        file.write_bytes(data[: len(data) // 2] if harm == "cut" else bytes([data[0] ^ 1]) + data[1:])


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        *((name, harm) for name in ("bus.msgpack", "config.yaml", "train/weights") for harm in ("flip", "remove")),
        *((META, harm) for harm in ("flip", "cut", "remove", "another step")),
    ],
)
def test_a_checkpoint_that_is_not_whole_is_left_for_the_newest_that_is(
    config: RelaxConfig, name: str, harm: str
) -> None:
    """resume=auto reports the skipped checkpoint and the reason. A damaged checkpoint is refused if it is named."""
    write_checkpoint(Path(config.run.dir), 5)
    older = write_checkpoint(Path(config.run.dir), 10, snapshot=b"of 10")
    newest = write_checkpoint(Path(config.run.dir), 20)
    file = newest / name
    damage(file, harm)
    point = find_resume_point(replace(config, resume="auto"))
    assert point is not None and (point.folder, point.step, point.snapshot) == (older, 10, b"of 10")
    (left,) = point.left
    assert left.startswith(f"step_00000020 is left: {file}") and left.endswith("the run goes on from step_00000010")
    with pytest.raises(ValueError, match=rf"{newest}: {file}.*resume={older}"):
        find_resume_point(replace(config, resume=str(newest)))


def test_auto_never_starts_afresh_beside_damaged_checkpoints(config: RelaxConfig) -> None:
    for step in (10, 20):
        damage(write_checkpoint(Path(config.run.dir), step) / META, "cut")
    with pytest.raises(ValueError, match=r"is complete: step_00000010 is left: .*; step_00000020 .*Start anew with"):
        find_resume_point(replace(config, resume="auto"))


def test_a_checkpoint_from_before_token_trees_is_refused(config: RelaxConfig) -> None:
    folder = write_checkpoint(Path(config.run.dir), 2, token_tree=False)
    config.resume = "auto"
    with pytest.raises(ValueError, match=rf"resume={folder}: it was written before groups were token trees.*export"):
        find_resume_point(config)


def test_a_folder_that_is_no_checkpoint(config: RelaxConfig, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"meta.json is not there"):
        find_resume_point(replace(config, resume=str(tmp_path)))


def test_a_checkpoint_of_the_trainer_alone_is_refused(config: RelaxConfig, tmp_path: Path) -> None:
    folder = CheckpointStore(tmp_path, keep_last=1).write(3, writers=lambda folder: None, meta={})
    with pytest.raises(ValueError, match=r"bus.msgpack is not there"):
        find_resume_point(replace(config, resume=str(folder)))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["seed=7"], "seed was 0, is 7. Go on with seed=0, or start a new run"),
        (["data.shuffle=false"], "data.shuffle was true, is false. Go on with data.shuffle=true"),
        (["algo=gspo"], "algo.name was grpo, is gspo"),
        (["algo.group_size=4"], "algo.group_size was 16, is 4"),
        (["model.dtype=bfloat16"], "model.dtype was float32, is bfloat16"),
        (
            ["rollout.banned_token_ids=[4,5]"],
            "rollout.banned_token_ids was [], is [4,5]. Go on with rollout.banned_token_ids=[]",
        ),
        (["modality.image_tokens=[4,64]"], "modality.image_tokens was [4,1024], is [4,64]"),
        (["modality.video_fps=1"], "modality.video_fps was 2.0, is 1.0. Go on with modality.video_fps=2.0"),
        (["seed=7", "data.size=9"], "seed was 0, is 7; data.size was 0, is 9. Go on with seed=0 data.size=0"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(config: RelaxConfig, overrides: list[str], message: str) -> None:
    made_with = load_config([f"run.dir={config.run.dir}"])
    folder = write_checkpoint(Path(config.run.dir), 10, config=made_with)
    before = plain(made_with)["data"]["size"]
    other_config = load_config([f"run.dir={config.run.dir}", "resume=auto", *overrides])
    with pytest.raises(ValueError, match="it was made by another run") as refused:
        find_resume_point(other_config)
    assert message.replace("data.size was 0", f"data.size was {before}").replace(
        "data.size=0", f"data.size={before}"
    ) in (str(refused.value))
    assert str(folder) in str(refused.value)


def test_changed_settings_are_reported(config: RelaxConfig) -> None:
    write_checkpoint(Path(config.run.dir), 10)
    tuned = ["optimizer.lr=5e-4", "rollout.temperature=0.9", "mode.max_staleness=3", "algo.clip_high=0.3"]
    point = find_resume_point(load_config([f"run.dir={config.run.dir}", "resume=auto", *tuned]))
    assert point is not None
    reported = {note.split(" was ")[0]: note for note in point.notes}
    assert reported.keys() == {"optimizer.lr", "rollout.temperature", "mode.max_staleness", "algo.clip_high"}
    assert reported["optimizer.lr"] == "optimizer.lr was 0.0008, is 0.0005 from step 10 on"


def test_where_and_how_long_a_run_goes_is_nobodys_business(config: RelaxConfig) -> None:
    write_checkpoint(Path(config.run.dir), 10)
    moved = ["name=other", "run.steps=500", "run.save_every=7", "run.panel=false", "engine.threads=2", "eval.every=0"]
    point = find_resume_point(load_config([f"run.dir={config.run.dir}", "resume=auto", *moved]))
    assert point is not None and point.notes == ()


def test_a_resume_with_an_automatic_dtype_keeps_that_of_the_run(config: RelaxConfig) -> None:
    """The checkpoint was written on a machine with another kind of processor."""

    def resumed(dtype: str) -> ResumePoint | None:
        overrides = [f"run.dir={config.run.dir}", "resume=auto", f"model.dtype={dtype}"]
        return find_resume_point(load_config(overrides, settle=settle))

    for dtype in DTYPES:
        write_checkpoint(Path(config.run.dir), 10, config=load_config([f"model.dtype={dtype}"]))
        point = resumed("auto")
        assert point is not None and point.dtype == dtype and point.notes == ()
    with pytest.raises(ValueError, match=r"model\.dtype was bfloat16, is float32"):
        resumed("float32")


# -- the content of data ----------------------------------------------------------------------------------------------
def on_file(run: Path, path: Path, *changes: str) -> RelaxConfig:
    keys = ("data=file", "data.prompt_key=q", "data.eval_size=2", "eval.rows=2", "reward=math", "model.task=arithmetic")
    return load_config([f"run.dir={run}", f"data.path={path}", "resume=auto", *keys, *changes])


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{n}?", "answer": "{n}"}}\n' for n in range(9)))
    return path


def test_data_that_only_moved_is_the_same_data(tmp_path: Path, rows: Path) -> None:
    made_with = on_file(tmp_path / "run", rows)
    write_checkpoint(tmp_path / "run", 10, config=made_with, digest=data_digest(made_with.data))
    moved = rows.rename(tmp_path / "moved.jsonl")
    point = find_resume_point(on_file(tmp_path / "run", moved))
    assert point is not None and point.notes == (
        f"data.path was {rows}, is {moved}, the same data by its content from step 10 on",
    )
    point = find_resume_point(on_file(tmp_path / "run", moved, "data.path=null", f"data.paths=[{moved}]"))
    assert point is not None and len(point.notes) == 2


def test_data_whose_content_changed_is_refused(tmp_path: Path, rows: Path) -> None:
    made_with = on_file(tmp_path / "run", rows)
    folder = write_checkpoint(tmp_path / "run", 10, config=made_with, digest=data_digest(made_with.data))
    rows.write_text(rows.read_text().replace("8?", "8!"))
    with pytest.raises(ValueError, match=rf"resume={folder}: it was made with other data: digest \w+; the"):
        find_resume_point(on_file(tmp_path / "run", rows))


def test_the_rows_of_a_plug_in_are_known_by_their_content(tmp_path: Path) -> None:
    def on_database(path: str) -> RelaxConfig:
        source = [f"data.name={SQLITE}", f"data.config.database={path}", "data.eval_size=8", "eval.rows=8"]
        return load_config([f"run.dir={tmp_path}/run", "resume=auto", "model.task=reverse_digits", *source])

    first = write_database(tmp_path / "rows.db", ROWS)
    made_with = on_database(first)
    write_checkpoint(tmp_path / "run", 10, config=made_with, digest=data_digest(made_with.data))
    moved = write_database(tmp_path / "moved.db", ROWS)
    point = find_resume_point(on_database(moved))
    assert point is not None and point.notes == (
        f"data.config was {{database:{first}}}, is {{database:{moved}}}, the same data by its content from step 10 on",
    )
    other_database = write_database(tmp_path / "other.db", [*ROWS[:-1], ("rev 1", "1")])
    with pytest.raises(ValueError, match=r"it was made by another run: data.config was \{database:"):
        find_resume_point(on_database(other_database))


def test_a_checkpoint_that_does_not_say_its_datas_content_compares_paths(tmp_path: Path, rows: Path) -> None:
    write_checkpoint(tmp_path / "run", 10, config=on_file(tmp_path / "run", rows))
    assert find_resume_point(on_file(tmp_path / "run", rows)) is not None
    moved = rows.rename(tmp_path / "moved.jsonl")
    with pytest.raises(ValueError, match=f"data.path was {rows}, is {moved}"):
        find_resume_point(on_file(tmp_path / "run", moved))


def test_how_rows_are_left_out_may_change_and_how_prompts_are_written_may_not(tmp_path: Path, rows: Path) -> None:
    made_with = on_file(tmp_path / "run", rows)
    write_checkpoint(tmp_path / "run", 10, config=made_with, digest=data_digest(made_with.data))
    point = find_resume_point(on_file(tmp_path / "run", rows, "data.max_bad_rows=0.2", "data.overlong=truncate_left"))
    assert point is not None and point.notes == (
        "data.max_bad_rows was 0.05, is 0.2 from step 10 on",
        "data.overlong was drop, is truncate_left from step 10 on",
    )
    with pytest.raises(ValueError, match=r"Go on with data.chat_template_kwargs=\{\}"):
        find_resume_point(on_file(tmp_path / "run", rows, "data.chat_template_kwargs.enable_thinking=false"))


def test_a_resumed_run_keeps_the_date_of_its_chat_template(config: RelaxConfig) -> None:
    with_date = replace(config, data=replace(config.data, template_date="2026-11-28"))
    write_checkpoint(Path(config.run.dir), 10, config=with_date)
    for again in (config, with_date):
        point = find_resume_point(replace(again, resume="auto"))
        assert point is not None and (point.template_date, point.notes) == ("2026-11-28", ())
    other_config = replace(config, data=replace(config.data, template_date="2026-11-29"), resume="auto")
    with pytest.raises(ValueError, match=r"data.template_date was 2026-11-28, is 2026-11-29"):
        find_resume_point(other_config)
    write_checkpoint(Path(config.run.dir), 20, config=config)  # a version of Relax without the key wrote it
    point = find_resume_point(replace(config, resume="auto"))
    assert point is not None and point.template_date is None


@pytest.mark.parametrize(("schedule", "jumps"), [("cosine", True), ("linear", True), ("constant", False)])
def test_a_longer_run_whose_learning_rate_jumps_is_told_so(tmp_path: Path, schedule: str, jumps: bool) -> None:
    own = [f"run.dir={tmp_path / 'run'}", f"optimizer.schedule={schedule}", "optimizer.warmup_steps=0"]
    write_checkpoint(tmp_path / "run", STEPS, config=load_config([*own, f"run.steps={STEPS}"]))
    point = find_resume_point(load_config([*own, f"run.steps={2 * STEPS}", "resume=auto"]))
    assert point is not None and len(point.notes) == jumps
    if jumps:
        (note,) = point.notes
        for word in ("run.steps was 100, is 200", f"optimizer.schedule={schedule}", "from 8.", "0.00044", "step 100"):
            assert word in note
    point = find_resume_point(load_config([*own, f"run.steps={STEPS}", "resume=auto"]))
    assert point is not None and point.notes == ()
