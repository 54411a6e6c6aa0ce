"""Tests the recorded samples of a process: tokens, ends, steps undone by a resume, incomplete and removed files."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import encode_tree
from relax_core.contracts.tree import TokenTree, group_uid
from relax_core.observe import event_log, sample_log
from relax_core.observe.event_log import CONTROLLER, EventWriter, TokensAt, event_files, newest_metrics
from relax_core.observe.sample_index import SampleIndex
from relax_core.observe.sample_log import SAMPLES_FOLDER, SampleLog, TokensRemoved, read_made_tree, read_trained
from tests.trees import answers_tree

PROMPT = [7, 8, 9]


def tree(index: int, *, version: int = 0) -> TokenTree:
    lengths = [2, 3]
    values = np.arange(5, dtype=np.float32) + index
    return answers_tree(
        group_uid(index),
        PROMPT,
        lengths,
        np.arange(5) + 10 * index,
        logprobs=-values,
        versions=version,
        rewards=[1.0, 0.25],
        advantages=values / 8,
    )


def group(index: int, *, version: int = 0) -> Group:
    whole = tree(index, version=version)
    uids = [episode.uid for episode in whole.episodes]
    columns = encode_tree(whole)
    return Group(group_uid=whole.group_uid, index=index, uids=uids, versions=[version] * len(uids), columns=columns)


def open_log(run_dir: Path, worker: str = "rollout-0", **changed: Any) -> SampleLog:
    given = {"first": 4, "every": 4, "max_bytes": 2**30} | changed
    return SampleLog(run_dir, worker=worker, **given)


def resume(run_dir: Path, step: int) -> int:
    controller = EventWriter(run_dir, CONTROLLER)
    attempt = controller.begin_attempt(step)
    controller.close()
    return attempt


def made_tree(run_dir: Path, row: dict[str, Any]) -> TokenTree:
    at = TokensAt(row["made_file"], row["made_offset"], row["made_size"])
    return read_made_tree(run_dir, row["group_uid"], at)


def found(index: SampleIndex, **filters: Any) -> list[dict[str, Any]]:
    index.refresh()
    return index.find(filters, order="oldest")[1]


def train(log: SampleLog, step: int, *trees: TokenTree, gap: float = 0.5) -> None:
    logprobs = np.concatenate([token_tree.logprobs[token_tree.tokens[1]] for token_tree in trees]) + gap
    log.trained(step, trees, logprobs.astype(np.float32))


def test_what_is_put_and_trained_is_read_back(tmp_path: Path) -> None:
    rollout, actor = open_log(tmp_path), open_log(tmp_path, "actor-0")
    rollout.put(group(3))
    train(actor, 0, tree(2), tree(3))  # group 2 is trained, but its record is missing
    train(actor, 0, tree(3), gap=9.0)  # a later epoch
    rollout.close(timeout_s=60.0)
    actor.close(timeout_s=60.0)

    first, second = found(SampleIndex(tmp_path, None))
    assert [first["uid"], first["state"], first["step"], first["staleness"]] == ["g00000003.0", "trained", 0, 0]
    assert [first["reward"], first["length"], first["parts"]] == [1.0, 2, {"exact": 1.0}]
    made = made_tree(tmp_path, second)
    rows = made.rows_of([second["number"]])
    assert made.token_ids[rows].tolist() == [*PROMPT, 32, 33, 34]
    assert made.logprobs[rows].tolist() == [0.0, 0.0, 0.0, -5.0, -6.0, -7.0]
    at = TokensAt(second["trained_file"], second["trained_offset"], second["trained_size"])
    trained = read_trained(tmp_path, at, first=second["trained_first"], count=second["length"])
    assert trained.advantages.tolist() == [5 / 8, 6 / 8, 7 / 8]
    assert trained.logprobs.tolist() == [-4.5, -5.5, -6.5]
    assert trained.trained.all()


def test_samples_that_are_counted_without_a_pass_have_no_log_probs_of_the_trainer(tmp_path: Path) -> None:
    rollout, actor = open_log(tmp_path), open_log(tmp_path, "actor-0")
    rollout.put(group(3))
    actor.trained(2, [tree(3)], None)
    rollout.close(timeout_s=60.0)
    actor.close(timeout_s=60.0)
    _, second = found(SampleIndex(tmp_path, None))
    assert [second["state"], second["step"], second["staleness"]] == ["trained", 2, 2]
    at = TokensAt(second["trained_file"], second["trained_offset"], second["trained_size"])
    trained = read_trained(tmp_path, at, first=second["trained_first"], count=second["length"])
    assert trained.advantages.tolist() == [5 / 8, 6 / 8, 7 / 8] and trained.trained.all()
    assert not len(trained.logprobs)


def test_how_a_sample_ended_comes_from_the_ledger(tmp_path: Path) -> None:
    """The ledger may record an end before or after the samples arrive. A group that is played again has no end yet."""
    log = open_log(tmp_path)
    index = SampleIndex(tmp_path, None)
    index.take_ledger([("g00000000.1", "stale"), ("g00000001.0", "over_sampled")])
    log.put(group(0))
    log.lost(tree(1))
    log.close(timeout_s=60.0)
    fates = [("put", ""), ("dropped", "stale"), ("dropped", "over_sampled"), ("made", "")]
    assert [(sample["state"], sample["reason"]) for sample in found(index)] == fates
    index.take_ledger([("g00000001.1", "zero_advantage"), ("g99999999.0", "stale")])
    assert [sample["uid"] for sample in found(index, reason="zero_advantage")] == ["g00000001.1"]
    assert index.overview()["state"] == {"dropped": 3, "put": 1}
    log = open_log(tmp_path)
    for _ in range(2):
        log.lost(tree(2))
    log.close(timeout_s=60.0)
    assert [sample["state"] for sample in found(index, group="g00000002")] == ["undone"] * 2 + ["made"] * 2


def test_a_resume_marks_what_it_undid(tmp_path: Path) -> None:
    """The checkpoint covers one step. Step 1 and groups made after the checkpoint are undone, and made again."""
    rollout, actor = open_log(tmp_path), open_log(tmp_path, "actor-0")
    for step in range(2):
        rollout.put(group(step, version=step))
        train(actor, step, tree(step, version=step))
    rollout.put(group(2, version=1))
    rollout.close(timeout_s=60.0)
    actor.close(timeout_s=60.0)
    index = SampleIndex(tmp_path, tmp_path / "cache" / "index.sqlite")
    assert index.refresh() == 5  # three groups, two trained groups

    resumed = open_log(tmp_path, attempt=resume(tmp_path, 1))
    resumed.put(group(1, version=1))
    resumed.close(timeout_s=60.0)
    states = {(sample["uid"], sample["state"]) for sample in found(index)}
    assert {state for uid, state in states if uid.startswith("g00000000")} == {"trained"}
    assert {state for uid, state in states if uid.startswith("g00000001")} == {"undone", "put"}
    assert {state for uid, state in states if uid.startswith("g00000002")} == {"undone"}
    index.close()
    again = SampleIndex(tmp_path, tmp_path / "cache" / "index.sqlite")
    assert again.refresh() == 0
    assert {(sample["uid"], sample["state"]) for sample in found(again)} == states


def test_large_files_are_read_piece_by_piece_in_order_of_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For any size of pieces, records of the earlier attempt are undone, and records of the later attempt are kept."""
    for start in (0, 4):
        attempt = resume(tmp_path, start)
        rollout, actor = (open_log(tmp_path, worker, attempt=attempt) for worker in ("rollout-0", "actor-0"))
        for step in range(start, start + 6):
            rollout.put(group(step, version=step))
            train(actor, step, tree(step, version=step))
        for log in (rollout, actor):
            log.close(timeout_s=60.0)

    def states() -> list[tuple[str, str, int | None]]:
        index = SampleIndex(tmp_path, None)
        while index.refresh():
            assert index.share() > 0.0
        assert index.share() == 1.0
        return [
            (sample["uid"], sample["state"], sample["step"]) for sample in index.find({}, order="oldest", most=99)[1]
        ]

    whole = states()
    assert [state for _, state, _ in whole] == ["trained"] * 8 + ["undone"] * 4 + ["trained"] * 12
    monkeypatch.setattr(event_log, "READ_BYTES", 700)
    assert states() == whole


def test_a_restarted_worker_of_the_same_attempt_undoes_nothing(tmp_path: Path) -> None:
    for index in range(2):
        log = open_log(tmp_path)
        log.put(group(index))
        log.close(timeout_s=60.0)
    assert list(event_files(tmp_path)) == ["0000.samples-rollout-0.0.jsonl", "0000.samples-rollout-0.1.jsonl"]
    assert {sample["state"] for sample in found(SampleIndex(tmp_path, None))} == {"put"}


def test_only_the_first_groups_of_a_step_are_kept(tmp_path: Path) -> None:
    log = open_log(tmp_path, first=1)
    for index in range(8):
        log.put(group(index))
    log.close(timeout_s=60.0)
    assert {sample["group_uid"] for sample in found(SampleIndex(tmp_path, None))} == {"g00000000", "g00000004"}


def test_the_oldest_tokens_go_first_and_numbers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sample_log, "GATHER_S", 0.001)
    log = open_log(tmp_path, max_bytes=16 * 200)
    for index in range(20):
        log.put(group(index))
        while log._put_bytes > log._done_bytes:  # each group is a separate batch that fills a part
            time.sleep(0.001)
    log.close(timeout_s=60.0)
    tokens = list((tmp_path / SAMPLES_FOLDER).glob("*.tokens"))
    assert 1 < len(tokens) < 20
    rows = found(SampleIndex(tmp_path, None))
    assert len(rows) == 40
    for row, there in ((rows[0], False), (rows[-1], True)):
        if there:
            assert made_tree(tmp_path, row).group_uid == row["group_uid"]
        else:
            with pytest.raises(TokensRemoved, match="newest 2 GiB"):
                made_tree(tmp_path, row)


def test_the_tokens_of_all_starts_together_have_the_limit(tmp_path: Path) -> None:
    for start in range(40):  # each run ends before a part is full
        log = open_log(tmp_path, max_bytes=16 * 400)
        log.put(group(start))
        log.close(timeout_s=60.0)
    tokens = list((tmp_path / SAMPLES_FOLDER).glob("*.tokens"))
    assert sum(path.stat().st_size for path in tokens) <= 16 * 400
    index = SampleIndex(tmp_path, None)
    index.refresh()
    assert index.find({})[0] == 80


def test_tokens_behind_a_link_or_damaged_are_not_read(tmp_path: Path) -> None:
    log = open_log(tmp_path / "run")
    log.put(group(0))
    log.close(timeout_s=60.0)
    row = found(SampleIndex(tmp_path / "run", None))[0]
    (tokens,) = (tmp_path / "run" / SAMPLES_FOLDER).glob("*.tokens")
    whole = tokens.read_bytes()
    tokens.write_bytes(whole[:-1])
    with pytest.raises(TokensRemoved, match="the copy of the run's folder is not whole"):
        made_tree(tmp_path / "run", row)
    tokens.write_bytes(b"\xff" + whole[1:])
    with pytest.raises(ValueError, match="damaged"):
        made_tree(tmp_path / "run", row)
    tokens.rename(tmp_path / "elsewhere")
    tokens.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(TokensRemoved, match="not a plain file"):
        made_tree(tmp_path / "run", row)
    with pytest.raises(TokensRemoved, match="not a name of a file of samples"):
        made_tree(tmp_path / "run", row | {"made_file": "../elsewhere"})


def test_a_half_written_record_waits_and_a_foreign_one_is_named(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.put(group(0))
    log.close(timeout_s=60.0)
    file = tmp_path / "events" / "0000.samples-rollout-0.0.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[:-1])
    index = SampleIndex(tmp_path, None)
    assert found(index) == []
    file.write_bytes(whole)
    assert len(found(index)) == 2
    file.write_bytes(whole + b'{"type":"made","group_uid":7}\n')
    assert len(found(index)) == 2
    assert "not an event of Relax" in index.problems()[0]


def test_other_readers_leave_sample_records_out(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    log.put(group(0))
    log.close(timeout_s=60.0)
    resume(tmp_path, 1)
    assert [event.step for event in event_log.EventReader(tmp_path).each()] == [1]
    assert newest_metrics(tmp_path).keys() == {"run"}


def test_a_group_whose_record_no_reader_takes_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log, "READ_BYTES", 300)
    log = open_log(tmp_path)
    log.put(group(0))
    log.close(timeout_s=60.0)
    assert (log.left_out, found(SampleIndex(tmp_path, None))) == (1, [])


def test_a_folder_that_cannot_be_written_costs_samples_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / SAMPLES_FOLDER).write_text("a file is in the way")
    with caplog.at_level(logging.WARNING):
        log = open_log(tmp_path)
        log.put(group(0))
        log.close(timeout_s=60.0)
    assert log.left_out == 1
    assert sum("The run goes on" in record.message for record in caplog.records) == 1


def test_filters_and_orders(tmp_path: Path) -> None:
    log = open_log(tmp_path)
    for index in range(3):
        log.put(group(index, version=index))
    log.close(timeout_s=60.0)
    index = SampleIndex(tmp_path, None)
    assert [sample["version"] for sample in found(index, version_min=1, reward_max=0.5)] == [1, 2]
    assert index.find({}, order="-reward", most=1)[1][0]["reward"] == 1.0
    assert index.find({}, most=2, first=4)[0] == 6
    with pytest.raises(ValueError, match="filters are uid, group"):
        index.find({"colour": 1})
