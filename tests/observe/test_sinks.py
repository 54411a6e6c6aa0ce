"""The files of the sinks are read back by TensorBoard's own reader and by a plain JSON parser."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_accumulator import EventAccumulator as PluginEventAccumulator

from relax_core.observe.event_log import RESUMED, RUN, HistogramRecord, MetricRecord, TextCell, TextRecord
from relax_core.observe.trackers.file_sinks import JsonlSink, TensorBoardSink

MakeRecord = Callable[..., MetricRecord]


def scalars(run_dir: Path, tag: str) -> list[tuple[int, float, float]]:
    reader = EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.wall_time, event.value) for event in reader.Scalars(tag)]


def histogram_of(name: str) -> HistogramRecord:
    return HistogramRecord(
        source="actor",
        step=3,
        time_s=1003.0,
        name=name,
        limits=[4.0, 8.0],
        counts=[3, 1],
        least=2.0,
        largest=8.0,
        total=17.0,
        total_of_squares=93.0,
    )


def test_tensorboard_reads_its_own_event_file(tmp_path: Path, make_record: MakeRecord) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.write(
        [make_record("actor", 0, reward=0.5, **{"algorithm/clip_share": 0.25}), make_record("eval", 0, exact=0.0)]
    )
    sink.write([TextRecord(kind="eval", step=0, time_s=0.0, rows=[])])
    sink.write([make_record("actor", 1, reward=0.75)])
    sink.close()
    assert scalars(tmp_path, "actor/reward") == [(0, 1000.0, 0.5), (1, 1001.0, 0.75)]
    assert scalars(tmp_path, "actor/algorithm/clip_share") == [(0, 1000.0, 0.25)]
    assert scalars(tmp_path, "eval/exact") == [(0, 1000.0, 0.0)]


def test_tensorboard_reads_the_histogram_and_json_lines_leave_it_out(tmp_path: Path) -> None:
    histogram = histogram_of("response_tokens")
    for sink in (TensorBoardSink(tmp_path), JsonlSink(tmp_path)):
        sink.write([histogram])
        sink.close()
    assert [path.name for path in tmp_path.iterdir()] == ["tensorboard"]
    reader = EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    (event,) = reader.Histograms("actor/response_tokens/distribution")
    assert (event.step, event.wall_time) == (3, 1003.0)
    found = event.histogram_value
    assert (found.min, found.max, found.num, found.sum, found.sum_squares) == (2.0, 8.0, 4.0, 17.0, 93.0)
    assert (list(found.bucket_limit), list(found.bucket)) == ([4.0, 8.0], [3.0, 1.0])


def test_each_dashboard_of_tensorboard_has_its_own_tags(tmp_path: Path, make_record: MakeRecord) -> None:
    """TensorBoard takes a tag for what its first event was, so numbers, histograms and texts share none."""
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    sink = TensorBoardSink(tmp_path)
    rows: list[dict[str, TextCell]] = [{"prompt": "<b>p</b>", "exact": True}, {"prompt": "q\n# r", "exact": False}]
    sink.write(
        [
            make_record("actor", 0, response_tokens=3.0),
            histogram_of("response_tokens"),
            TextRecord(kind="eval", step=0, time_s=1.0, rows=rows),
        ]
    )
    sink.close()
    reader = PluginEventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    tags = {plugin: set(reader.PluginTagToContent(plugin)) for plugin in ("scalars", "histograms", "text")}
    assert tags == {
        "scalars": {"actor/response_tokens"},
        "histograms": {"actor/response_tokens/distribution"},
        "text": {"config", "eval/texts"},
    }
    (event,) = reader.Tensors("eval/texts")
    (text,) = event.tensor_proto.string_val
    assert text.decode().split("\n\n") == [
        *("**prompt**", "    <b>p</b>", "**exact**", "    True", "---"),
        *("**prompt**", "    q\n    # r", "**exact**", "    False"),
    ]


def test_tensorboard_hides_the_steps_that_a_resume_undid(tmp_path: Path, make_record: MakeRecord) -> None:
    first = TensorBoardSink(tmp_path)
    first.write([make_record("actor", step, reward=0.0) for step in range(6)])
    first.close()
    second = TensorBoardSink(tmp_path)
    second.write([make_record(RUN, 4, **{RESUMED: 1.0}), make_record("actor", 4, reward=1.0)])
    second.close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2
    assert [(step, value) for step, _, value in scalars(tmp_path, "actor/reward")] == [
        (0, 0.0),
        (1, 0.0),
        (2, 0.0),
        (3, 0.0),
        (4, 1.0),
    ]


def test_json_lines_are_plain_json_with_null_for_nan(tmp_path: Path, make_record: MakeRecord) -> None:
    sink = JsonlSink(tmp_path)
    sink.write([make_record("actor", 7, loss=float("nan"), reward=0.5)])
    sink.close()
    (line,) = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line) == {
        "type": "numbers",
        "source": "actor",
        "step": 7,
        "time_s": 1007.0,
        "values": {"loss": None, "reward": 0.5},
    }
    assert not (tmp_path / "texts.jsonl").exists()


def test_a_line_that_a_killed_process_left_unfinished_is_cut_off(tmp_path: Path, make_record: MakeRecord) -> None:
    path = tmp_path / "metrics.jsonl"
    first = JsonlSink(tmp_path)
    first.write([make_record("actor", 0, reward=0.5)])
    first.close()
    with path.open("a") as file:
        file.write('{"source":"actor","st' + "e" * 200_000)
    second = JsonlSink(tmp_path)
    second.write([make_record("actor", 1, reward=0.75)])
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [0, 1]
    assert path.stat().st_size < 1_000
