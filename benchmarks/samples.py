"""Measures the cost of logging all samples: in the event loop, and in the thread that writes the files.

`python -m benchmarks.samples` prints microseconds for each train step of the demo (8 groups of 16 answers), their share
of a step, and bytes for each sample. The calls block the rollout's event loop. The thread runs in parallel, and holds
the interpreter lock for about its CPU time.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from relax_core.contracts.bus import Group
from relax_core.contracts.columns import encode_tree
from relax_core.contracts.tree import TokenTree, group_uid
from relax_core.observe.sample_log import SampleLog
from tests.trees import answers_tree

GROUPS, ANSWERS, PROMPT_TOKENS = 8, 16, 17


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--answer-tokens", type=int, default=6, help="of each answer; the demo has about 6")
    parser.add_argument("--step-ms", type=float, default=65.0, help="wall time of a train step, for the printed share")
    given = parser.parse_args()
    trees = [_tree(index, given.answer_tokens) for index in range(GROUPS)]
    columns = [encode_tree(tree) for tree in trees]
    with tempfile.TemporaryDirectory() as folder:
        rollout, actor = (_log(Path(folder), worker) for worker in ("rollout-0", "actor-0"))
        put_s = trained_s = 0.0
        cpu = time.process_time()
        for step in range(given.steps):
            groups = [_group(tree, its_columns) for tree, its_columns in zip(trees, columns, strict=True)]
            logprobs = np.concatenate([tree.logprobs[tree.tokens[1]] for tree in trees])
            began = time.perf_counter()
            for group in groups:
                rollout.put(group)
            put_s += time.perf_counter() - began
            began = time.perf_counter()
            actor.trained(step, trees, logprobs)
            trained_s += time.perf_counter() - began
            time.sleep(1e-3)
        rollout.close(timeout_s=60.0)
        actor.close(timeout_s=60.0)
        cpu_s = time.process_time() - cpu
        nbytes = sum(path.stat().st_size for path in Path(folder).glob("*/*"))
        assert rollout.left_out == actor.left_out == 0
    step_us = 1e3 * given.step_ms
    for what, seconds in (
        ("rollout: calls in the event loop", put_s),
        ("trainer: calls in the train step", trained_s),
        ("processor time of both processes, this benchmark's own loop included", cpu_s),
    ):
        micros = 1e6 * seconds / given.steps
        print(f"{what:<72} {micros:8.1f} us a step  {100 * micros / step_us:6.3f} % of {given.step_ms:g} ms")
    print(f"{'files':<72} {nbytes / given.steps / GROUPS / ANSWERS:8.1f} bytes a sample")


def _log(folder: Path, worker: str) -> SampleLog:
    return SampleLog(folder, worker=worker, first=GROUPS, every=GROUPS, max_bytes=2**30)


def _tree(index: int, answer_tokens: int) -> TokenTree:
    tokens = ANSWERS * answer_tokens
    random = np.random.default_rng(index)
    return answers_tree(
        group_uid(index),
        np.arange(PROMPT_TOKENS),
        [answer_tokens] * ANSWERS,
        random.integers(0, 1000, tokens),
        logprobs=-random.random(tokens),
        versions=3,
        rewards=random.random(ANSWERS).tolist(),
        advantages=random.normal(size=tokens).astype(np.float32),
    )


def _group(tree: TokenTree, columns: dict[str, bytes]) -> Group:
    uids = [episode.uid for episode in tree.episodes]
    return Group(group_uid=tree.group_uid, index=0, uids=uids, versions=[3] * ANSWERS, columns=columns)


if __name__ == "__main__":
    main()
