"""Makes a small run's folder with the real writers: metrics, samples, ledger, logs, configuration."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np

from relax_core.bus.journal import Journal
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.columns import encode_tree
from relax_core.contracts.tree import TokenTree, group_uid
from relax_core.observe.event_log import SKELETONS, EventReader, EventWriter, Record
from relax_core.observe.sample_log import SAMPLES_FOLDER, TOKENIZER_FOLDER, SampleLog
from relax_core.observe.stragglers import STRAGGLER, Straggler, straggler_row
from relax_core.observe.trackers.file_sinks import JsonlSink
from tests.trees import answers_tree

HOSTILE = "</script><img src=x onerror=alert(1)>\u202eabc\x1b[31m"
STEPS = 4
COUNTED = 2  # the forward pass does not compute this step's group
SLOW = Straggler(
    kind="engine",
    who="engine-1",
    part="decode",
    from_step=2,
    to_step=3,
    slower=0.25,
    excess_ms=40.0,
    compared_with=("engine-0", "engine-2"),
)


def make_run(folder: Path) -> Path:
    """Makes a run of four groups of two samples, resumed at step 2. One sample is stale, one group has no reward."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text("name: demo\nrun:\n  steps: 6\nalgo:\n  name: grpo\n")
    (folder / "summary.json").write_text('{"outcome":"finished","steps":4,"samples_per_s":10.5}')
    (folder / "logs").mkdir()
    (folder / "logs" / "actor-0.log").write_text("first\n<b>second\nth")
    _tokenizer(folder / SAMPLES_FOLDER / TOKENIZER_FOLDER)
    _metrics(folder)
    _samples(folder)
    return folder


def _metrics(folder: Path) -> None:
    service = EventWriter(folder, "controller")
    times = {"step_ms": 8.0, "wait_ms": 6.0, "train_ms": 1.5}
    service.record("rollout", 0, {"generate_ms": 4.0, "samples": 8.0})
    service.record("process", 0, {"actor-0/cores": 0.5, "actor-0/memory_mb": 350.0, "actor-0/children": 1.0})
    service.record("actor", 0, {"reward": 0.0, "loss": 1.0, "logprob_gap_max": float("nan"), **times})
    service.record("actor", 1, {"reward": 0.1, "loss": 0.5, **times})
    service.record("actor", 2, {"reward": 0.2, "loss": 0.4, **times})
    service.begin_attempt(2)
    service.record("process", 3, {"actor-0/cores": 0.75, "actor-0/memory_mb": 250.0, "bus/cores": 0.125})
    service.record("actor", 2, {"reward": 0.25, "loss": 0.4, **times})
    service.record("actor", 3, {"reward": 0.3, "loss": 0.3, **times})
    for step, right in ((0, 0), (4, 1)):
        rows = [
            {"prompt": f"q{number}", "answer": "a", "response": f"{HOSTILE} at {step}", "exact": number < right}
            for number in range(2)
        ]
        service.record_texts("eval", step, rows)
    form = {"text": HOSTILE, "share": 1.0, "shadow": None, "new_share": 0.5, "tokens": 3.0, "example": HOSTILE}
    service.record_texts(SKELETONS, 4, [form | {"notice": f"a form {HOSTILE} took over"}])
    service.record_texts(STRAGGLER, 3, [straggler_row(SLOW)])
    service.record_texts("bad_rows", 0, [{"row": 1, "reason": "bad_row", "text": "t"}])
    service.close(timeout_s=60.0)
    sink = JsonlSink(folder)
    sink.write([event for event in EventReader(folder).each() if isinstance(event, Record)])
    sink.close()


def _samples(folder: Path) -> None:
    journal = Journal(folder / "ledger.sqlite")
    rollout, actor = (
        SampleLog(folder, worker=name, attempt=1, first=1, every=1, max_bytes=2**30)
        for name in ("rollout-0", "actor-0")
    )
    for index in range(STEPS):
        tree = _tree(index)
        uids = [episode.uid for episode in tree.episodes]
        columns = encode_tree(tree)
        rollout.put(Group(group_uid=tree.group_uid, index=index, uids=uids, versions=[index] * 2, columns=columns))
        journal.append("issued", tree.group_uid, uids, versions=[index] * 2)
        journal.append("put", tree.group_uid, uids, versions=[index] * 2, persisted=(columns[c.EPISODES],))
        stale = index == 0
        part = tree.take([0]) if stale else tree
        computed = (part.logprobs[part.tokens[1]] + 0.25).astype(np.float32)
        actor.trained(index, [part], None if index == COUNTED else computed)
        journal.append("trained", tree.group_uid, uids[:1] if stale else uids, step=index, versions=[index] * 2)
        if stale:
            journal.append("dropped", tree.group_uid, uids[1:], step=index, reason="stale")
    lost = _tree(STEPS)
    rollout.lost(lost)
    uids = [episode.uid for episode in lost.episodes]
    journal.append("issued", lost.group_uid, uids, version=STEPS)
    journal.append("dropped", lost.group_uid, uids, step=STEPS, reason="reward_failed")
    for log in (rollout, actor):
        log.close(timeout_s=60.0)
    journal.close(timeout_s=60.0)


def _tree(index: int) -> TokenTree:
    answers = [[1, 2], [1, 2, 2]]
    return answers_tree(
        group_uid(index),
        [3, 0, 4],
        [len(answer) for answer in answers],
        [token for answer in answers for token in answer],
        logprobs=np.array([-1.0, -0.5, -2.0, -0.1, -0.3]),
        versions=index,
        rewards=[1.0, 0.25],
        advantages=np.array([0.5, 0.5, -0.5, -0.5, -0.5], dtype=np.float32),
    )


def _tokenizer(folder: Path) -> None:
    """Writes a tokenizer of complete words. One word would be code in a page that does not escape text."""
    folder.mkdir(parents=True)
    words = ["prompt", HOSTILE, "answer", "<bos>", "\n"]
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Fuse"},
        "model": {
            "type": "WordLevel",
            "vocab": {word: token for token, word in enumerate(words)},
            "unk_token": "prompt",
        },
    }
    (folder / "tokenizer.json").write_bytes(msgspec.json.encode(tokenizer))
