"""Tests the report at the end of a run, and the plot of its curves."""

from __future__ import annotations

import io
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from relax_core.config.choices import Schedule
from relax_core.config.compose import compose, load_config, typed_config
from relax_core.config.saved_config import to_yaml
from relax_core.contracts.bus import BusProgress
from relax_core.observe.event_log import MetricRecord
from relax_core.observe.report import (
    answers_table,
    next_commands,
    played_episode,
    plot_curves,
    print_report,
    report_console,
)
from relax_core.observe.summary import build_summary
from relax_core.preflight import CHECKS, settle

MakeRecord = Callable[..., MetricRecord]
META = {"outcome": "finished", "wall_s": 30.0, "first_step_s": 12.5}


def row(prompt: str, answer: str, response: str) -> dict[str, str | bool]:
    return {"prompt": prompt, "answer": answer, "response": response, "exact": answer == response}


def rendered(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_report_tells_the_run(tmp_path: Path, make_record: MakeRecord, progress: BusProgress) -> None:
    for name in ("hf", "tensorboard"):
        (tmp_path / name).mkdir()
    records = [make_record("actor", step, reward=step / 11, exact=0.5, step_ms=40.0, samples=4) for step in range(12)]
    records.append(make_record("eval", 12, exact=0.5, reward=0.75, rows=16))
    summary = build_summary(records, progress=progress, meta=META | {"seed": 3, "repeatable": False})
    console = Console(file=io.StringIO(), width=100)
    before = [row("reverse 12", "21", "1 [bold]"), row("reverse 34", "43", "43"), row("reverse 56", "65", "6")]
    after = [row("reverse 12", "21", "21"), row("reverse 34", "43", "43"), row("reverse 56", "65", "66")]
    print_report(console, tmp_path, summary, before, after)
    text = rendered(console)
    assert "finished after 12 train steps in 30 s" in text
    assert "0.409 → 0.591 in training" in text  # means of 0..9 and of 2..11 over 11
    assert "0.500 at step 12, 16 prompts" in text
    assert "100 samples/s" in text
    assert "– (no token was trained with the weights that sampled it)" in text
    assert "finished after" in text and "records missing" not in text
    assert "the same seed, 3, gives another run" in text
    assert "4 dropped (3 stale, 1 reward timeout)" in text
    assert "✗ 1 [bold]" in text and "✓ 21" in text
    assert f"{tmp_path}/hf" in text.replace("\n", "") and "checkpoints" not in text
    assert "tensorboard --logdir" in text and "mode=colocate" in text


def test_what_speaks_against_a_finished_run_stands_below_its_first_line(
    tmp_path: Path, make_record: MakeRecord, progress: BusProgress
) -> None:
    records = [
        make_record(
            "actor",
            step,
            reward=1.0 if step < 10 else 0.0,
            truncated=0.5,
            logprob_gap_tokens=4,
            logprob_gap_max=2e-6,
            logprob_gap_mean=1e-6,
            **{"response_tokens": 4.0, "response_tokens/min": 1.0, "response_tokens/max": 8.0},
        )
        for step in range(20)
    ]
    summary = build_summary(records, progress=progress, meta=META | {"records_dropped": {"tensorboard": 1200}})
    console = Console(file=io.StringIO(), width=100)
    print_report(console, tmp_path, summary, [], [])
    _, first, second, *_ = rendered(console).splitlines()
    assert first.startswith("finished after") and second.startswith(
        "The reward fell from 1.000 (steps 0 to 9) to 0.000"
    )
    assert "4.0 tokens (1 to 8) · 50% cut · entropy – nats" in rendered(console)
    assert "max 2.0e-06 between rollout and trainer" in rendered(console)
    assert "records missing: 1,200 in tensorboard" in rendered(console)


def test_lines_of_a_report_into_a_file_are_whole(
    tmp_path: Path, make_record: MakeRecord, progress: BusProgress, capsys: pytest.CaptureFixture[str]
) -> None:
    summary = build_summary([make_record("actor", 0, reward=0.5, step_ms=40.0)], progress=progress, meta=META)
    print_report(report_console(), tmp_path, summary, [], [])
    lines = capsys.readouterr().out.splitlines()
    (samples,) = (line for line in lines if line.startswith("samples"))
    assert len(samples) > 80 and "issued" in samples and samples.rstrip().endswith("trained twice")
    assert not [line for line in lines if line.startswith("   ")]  # such a line would be the rest of a wrapped line


def test_answers_that_changed_come_first_and_long_ones_keep_their_end() -> None:
    before = [row("same", "1", "1"), row("wrong", "2", "x"), row("learned", "3", "y"), row("gone", "4", "4")]
    after = [row("same", "1", "1"), row("wrong", "2", "thinks " * 40 + "so 7"), row("learned", "3", "3")]
    table = answers_table(before, after)
    console = Console(file=io.StringIO(), width=140)
    console.print(table)
    text = rendered(console)
    assert table.row_count == 3
    assert text.index("learned") < text.index("same") < text.index("wrong")
    assert "… " in text and "so 7" in text and "gone" not in text


def test_an_episode_of_several_turns_is_shown_whole_with_the_responses_in_another_style() -> None:
    played = (
        "user: guess\nassistant: ⟦4⟧ [reward 0]\nuser: higher [not markup]\nassistant: ⟦6\n⟧ [reward 1]\n[env_done]"
    )
    before = [row("seed 1", "", "user: guess\nassistant: ⟦1⟧\n[max_turns]") | {"exact": False}, row("seed 2", "", "")]
    after = [row("seed 2", "", ""), row("seed 1", "", played) | {"exact": True}]
    shown = played_episode(before, after)
    assert shown is not None and shown.plain == played
    assert [shown.plain[span.start : span.end] for span in shown.spans] == ["⟦4⟧", "⟦6\n⟧"]
    assert played_episode([row("rev 1", "1", "1")], [row("rev 1", "1", "1")]) is None


@pytest.mark.parametrize("outcome", ["stopped", "failed: engine 0 is [gone]"])
def test_a_run_that_did_not_finish_is_told_how_to_go_on(tmp_path: Path, progress: BusProgress, outcome: str) -> None:
    summary = build_summary([], progress=progress, meta=META | {"outcome": outcome})
    assert next_commands(tmp_path, summary) == []
    (tmp_path / "checkpoints" / "step-5").mkdir(parents=True)
    assert next_commands(tmp_path, summary) == [
        (f"python -m relax_core run.dir={tmp_path} resume=auto", "go on from the newest checkpoint")
    ]
    console = Console(file=io.StringIO(), width=100)
    print_report(console, tmp_path, summary, [], [])
    assert outcome in rendered(console) and "expected" not in rendered(console)


def test_commands_repeat_the_run_with_one_thing_changed(tmp_path: Path, progress: BusProgress) -> None:
    (tmp_path / "checkpoints" / "step-12").mkdir(parents=True)
    (tmp_path / "metrics.jsonl").touch()
    overrides = ["mode=colocate", "run.steps=12", "data.path=my rows.jsonl", "resume=auto", "mode.on_stale=mask"]
    summary = build_summary([], progress=progress, meta=META | {"overrides": overrides})
    commands = {purpose: command for command, purpose in next_commands(tmp_path, summary)}
    page = commands["curves, samples and lanes over time in the browser"]
    assert page == f"python -m relax_core dashboard {tmp_path}"
    assert commands["train on"] == (
        "python -m relax_core mode=colocate 'data.path=my rows.jsonl' mode.on_stale=mask "
        f"run.dir={tmp_path} resume=auto run.steps=24"
    )
    assert commands["let rollouts run further ahead"] == (
        "python -m relax_core run.steps=12 'data.path=my rows.jsonl' mode=async mode.max_staleness=4"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["run.steps=12", "++mode.max_staleness=2"],
        ["run.epochs=0.01", "name=1e5"],
        ["optimizer.schedule=constant", "rollout.workers=2"],
        ["mode.max_staleness=2", "rollout.stop=[</answer>]"],
        ["env=number_guess", "reward=env", "mode.max_staleness=0", "rollout.lockstep=true"],
    ],
)
def test_every_command_that_is_printed_can_start(tmp_path: Path, progress: BusProgress, words: list[str]) -> None:
    words = [*words, f"++run.dir={tmp_path}"]
    config = load_config(words, settle=settle)
    (tmp_path / "checkpoints" / "step-12").mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    summary = build_summary([], progress=progress, meta=META | {"overrides": words})
    for command, purpose in next_commands(tmp_path, summary):
        _, _, module, *printed = shlex.split(command)
        assert module == "relax_core"
        if purpose == "your own model and data":
            typed_config(compose(printed))
            continue
        load_config(printed, checks=CHECKS, settle=settle)
        if purpose.startswith("train on"):
            assert ("the learning rate jumps from" in purpose) == (config.optimizer.schedule is not Schedule.constant)
        else:
            assert str(tmp_path) not in command  # a new run has its own folder


def test_the_curves_are_a_picture_of_sensible_size(tmp_path: Path, make_record: MakeRecord) -> None:
    records = [make_record("actor", step, reward=step / 60, exact=step / 120) for step in range(60)]
    records += [make_record("eval", step, reward=0.5, exact=0.25) for step in (0, 30, 60)]
    path = plot_curves(records, tmp_path / "curves.png")
    with Image.open(path) as picture:
        picture.load()
        assert (picture.format, picture.size) == ("PNG", (1320, 528))
        colours = picture.convert("RGB").getcolors(maxcolors=1 << 24)
    assert colours is not None
    counts = {colour: count for count, colour in colours}
    assert counts[(0x1F, 0x5F, 0xA8)] > 500 and counts[(0xD9, 0x66, 0x0A)] > 200  # the plot has both curves
    assert counts[(255, 255, 255)] > 0.8 * 1320 * 528
    assert 10_000 < path.stat().st_size < 200_000


def test_a_run_of_one_step_and_one_without_evaluation_are_drawn(tmp_path: Path, make_record: MakeRecord) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plot_curves([make_record("actor", 0, reward=0.5, exact=0.0)], tmp_path / "one.png")
        plot_curves([make_record("eval", 0, reward=0.5, exact=0.0)], tmp_path / "eval.png")
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_curves([], tmp_path / "none.png")
