"""Tests that both teacher scorers return transformers' log-probs, and the columns made from these log-probs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from benchmarks.family_models import make_family_model
from relax_core.config.compose import load_config
from relax_core.contracts import columns as c
from relax_core.contracts.bus import Group
from relax_core.contracts.engine import EngineUnreachable
from relax_core.contracts.tree import TokenTree
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer import teacher_worker
from relax_core.roles.trainer.teacher_worker import EngineTeacher, ForwardTeacher, TeacherScores, TeacherWorker
from relax_core.train.micro_batches import decode_train_tree
from tests.train.tiny_models import VOCABULARY
from tests.train.tiny_trainer import make_groups
from tests.trees import answer_ids, answers_of, of_tokens, prompt_of, random_tree

TOLERANCE = 2e-5
TOP_K = 6
TEMPERATURE = 0.7
TOKEN = "token-of-the-run"
GROUPS = make_groups([[5, 1, 8], [7, 2], [3]], prompt_lengths=[9, 4, 12], seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a Llama, because a teacher needs only the student's vocabulary, not its family."""
    path = tmp_path_factory.mktemp("teacher")
    make_family_model(path, "llama, llama3 rope", seed=5)
    return path


@pytest.fixture(scope="module")
def context(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> RunContext:
    run = tmp_path_factory.mktemp("run")
    (run / "token").write_text(TOKEN)
    config = load_config(["algo=distill", f"rollout.temperature={TEMPERATURE}"], settle=settle)
    return RunContext(
        config=config,
        run_namespace="test",
        namespace="test-0",
        run_dir=run,
        model_folder=run / "no-such-student",
        weights_folder=run,
        token_file=run / "token",
        resume_from=None,
        start_step=0,
        teacher_folders={"default": folder},
    )


class OneEngine:
    """A fake engine directory. It returns the address of a dead engine ``lost`` times."""

    def __init__(self, client: EngineClient, lost: list[EngineClient]) -> None:
        self._client, self._lost = client, lost
        self.forgotten: list[str] = []

    def client(self, engine: int) -> EngineClient:
        assert engine == 0
        return self._lost[0] if self._lost else self._client

    def forget(self, url: str) -> None:
        self.forgotten.append(url)
        self._lost.pop()


@pytest.fixture(scope="module")
def client(context: RunContext, folder: Path) -> Iterator[EngineClient]:
    engine = replace(context.config.engine)
    launch = EngineLaunch(
        model_folder=folder,
        engine=engine,
        dtype="float32",
        token_file=context.token_file,
        log_file=context.run_dir / "engine.log",
        load_weights=True,
    )
    process = EngineProcess.start(launch)
    client = EngineClient(process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    yield client
    client.close()
    process.stop(timeout_s=5.0)


def expected(folder: Path, group: TokenTree) -> list[torch.Tensor]:
    """Returns each sample's log-softmax at its response tokens, ``[tokens, vocab]``."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    found = []
    prompt = prompt_of(group)
    for response in answers_of(group):
        ids = torch.tensor(np.concatenate([prompt, response]))[None]
        with torch.no_grad():
            logits = model(ids).logits[0, len(prompt) - 1 : -1]
        found.append((logits / TEMPERATURE).log_softmax(-1))
    return found


def assert_right(scores: list[TeacherScores], folder: Path, *, top_k: int) -> None:
    for group, score in zip(GROUPS, scores, strict=True):
        wanted = torch.cat(expected(folder, group))
        chosen = wanted.gather(-1, torch.tensor(answer_ids(group), dtype=torch.int64)[:, None])[:, 0]
        assert score.logprobs.dtype == np.float32 and not score.logprobs[group.versions < 0].any()
        assert float(np.abs(of_tokens(group, score.logprobs) - chosen.numpy()).max()) <= TOLERANCE
        if not top_k:
            assert score.top_ids is None and score.top_logprobs is None
            continue
        assert score.top_ids is not None and score.top_logprobs is not None
        assert (score.top_ids.dtype, score.top_logprobs.dtype) == (np.int32, np.float32)
        top = wanted.topk(top_k, -1)
        assert float(np.abs(of_tokens(group, score.top_logprobs) - top.values.numpy()).max()) <= TOLERANCE
        by_id = wanted.gather(-1, torch.tensor(of_tokens(group, score.top_ids), dtype=torch.int64))
        assert float((by_id - top.values).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_forward_and_engine_agree_with_transformers(
    context: RunContext, client: EngineClient, folder: Path, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(teacher_worker, "TOKENS_A_CALL", 30)  # makes several calls necessary
    by_engine = EngineTeacher(context, OneEngine(client, []), 0, top_k=top_k)  # type: ignore[arg-type]
    assert_right(by_engine.score(GROUPS), folder, top_k=top_k)
    assert_right(ForwardTeacher(context, folder, top_k=top_k).score(GROUPS), folder, top_k=top_k)


@pytest.mark.parametrize("top_k", [0, TOP_K])
def test_both_score_the_turns_of_trees_of_any_depth(
    context: RunContext, client: EngineClient, folder: Path, top_k: int
) -> None:
    """An engine scores each path. The forward pass computes each row once."""
    random = np.random.default_rng(5)
    trees = [random_tree(random, uid=f"g{place}", roots=2, vocabulary=VOCABULARY) for place in range(2)]
    by_engine = EngineTeacher(context, OneEngine(client, []), 0, top_k=top_k).score(trees)  # type: ignore[arg-type]
    by_forward = ForwardTeacher(context, folder, top_k=top_k).score(trees)
    for tree, engine_scores, forward_scores in zip(trees, by_engine, by_forward, strict=True):
        assert engine_scores.logprobs[tree.sampled].all() and not engine_scores.logprobs[tree.versions < 0].any()
        assert float(np.abs(engine_scores.logprobs - forward_scores.logprobs).max()) <= TOLERANCE
        if top_k:
            assert engine_scores.top_logprobs is not None and forward_scores.top_logprobs is not None
            assert float(np.abs(engine_scores.top_logprobs - forward_scores.top_logprobs).max()) <= TOLERANCE


def test_an_engine_that_died_is_waited_for_but_not_for_ever(context: RunContext, client: EngineClient) -> None:
    gone = EngineClient("http://127.0.0.1:9", TOKEN, request_timeout_s=1.0, control_timeout_s=1.0)
    directory = OneEngine(client, [gone, gone])
    teacher = EngineTeacher(context, directory, 0, top_k=0)  # type: ignore[arg-type]
    assert len(teacher.score(GROUPS[:1])) == 1 and len(directory.forgotten) == 2
    short = replace(context.config, engine=replace(context.config.engine, start_timeout_s=0.05))
    never = EngineTeacher(replace(context, config=short), OneEngine(gone, [gone] * 99), 0, top_k=0)  # type: ignore[arg-type]
    with pytest.raises(EngineUnreachable, match=r"127\.0\.0\.1:9"):
        never.score(GROUPS[:1])


class Fixed:
    """A teacher that returns the same number for all log-probs."""

    def __init__(self, value: float) -> None:
        self._value = value

    def score(self, groups: list[TokenTree]) -> list[TeacherScores]:
        return [
            TeacherScores(
                np.full(group.rows, self._value, np.float32),
                np.arange(2 * group.rows, dtype=np.int32).reshape(group.rows, 2),
                np.full((group.rows, 2), self._value - 1, np.float32),
            )
            for group in groups
        ]


def leased(group: TokenTree, teacher: str) -> Group:
    uids = [episode.uid for episode in group.episodes]
    columns = {**c.encode_tree(replace(group, extras={})), c.TEACHER: msgspec.msgpack.encode(teacher)}
    return Group(group_uid=group.group_uid, index=0, uids=uids, versions=[0] * len(uids), columns=columns)


def test_each_row_gets_the_teacher_that_it_names_and_the_trainer_reads_the_columns() -> None:
    worker: Any = TeacherWorker.__new__(TeacherWorker)  # makes the worker without starting its loop
    worker._teachers = {"a": Fixed(-1.0), "b": Fixed(-2.0)}
    rows = [leased(group, name) for group, name in zip(GROUPS, ("b", "a", "b"), strict=True)]
    columns = worker.columns_of(rows)
    for row, group, value in zip(rows, GROUPS, (-2.0, -1.0, -2.0), strict=True):
        found = columns[group.group_uid]
        advantages = {c.ADVANTAGES: c.encode_column(c.ADVANTAGES, group.extras["advantages"])}
        whole = msgspec.structs.replace(row, columns={**row.columns, **found, **advantages})
        trained, _ = decode_train_tree(whole, step=0, oldest_version=0)
        assert trained.extras["teacher_logprobs"].tolist() == [value] * group.rows
        assert trained.extras["teacher_top_ids"].tolist() == [[2 * t, 2 * t + 1] for t in range(group.rows)]
        assert trained.extras["teacher_top_logprobs"].shape == (group.rows, 2)
