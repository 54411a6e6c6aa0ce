"""Tests that a teacher in an engine scores trees with pictures in the prompt, or in one branch only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from relax_core.config.compose import load_config
from relax_core.contracts.media import Media
from relax_core.contracts.tree import NOT_SAMPLED
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.roles.role_context import RunContext
from relax_core.roles.trainer.teacher_worker import EngineTeacher
from tests.roles.trainer.test_teacher_worker import TEMPERATURE, TOKEN, OneEngine
from tests.trees import answers_tree
from tests.vision_models import Seen, make_tiny_vision_model, text


@pytest.fixture
def context(tmp_path: Path) -> RunContext:
    (tmp_path / "token").write_text(TOKEN)
    return RunContext(
        config=load_config(["algo=distill", f"rollout.temperature={TEMPERATURE}"], settle=settle),
        run_namespace="test",
        namespace="test-0",
        run_dir=tmp_path,
        model_folder=tmp_path / "no-such-student",
        weights_folder=tmp_path,
        token_file=tmp_path / "token",
        resume_from=None,
        start_step=0,
        teacher_folders={"default": tmp_path / "model"},
    )


@pytest.fixture
def client(context: RunContext, tmp_path: Path) -> Iterator[EngineClient]:
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=tmp_path / "model",
            engine=replace(context.config.engine),
            dtype="float32",
            token_file=context.token_file,
            log_file=tmp_path / "engine.log",
            load_weights=True,
            media_folder=tmp_path / "media",
        )
    )
    client = EngineClient(process.url, TOKEN, request_timeout_s=60.0, control_timeout_s=30.0)
    yield client
    client.close()
    process.stop(timeout_s=5.0)


def test_an_engine_scores_each_path_with_its_own_pictures(
    context: RunContext, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model = make_tiny_vision_model(tmp_path / "model")
    seen = Seen(tmp_path / "model", tmp_path / "media")
    prompt, media = seen.prompt(text(4), seen.image(2, 3, seed=1), text(5))
    turn, later = seen.prompt(text(3), seen.image(3, 2, seed=2), text(4))
    answers = [text(5, seed=1), turn + text(6, seed=2), text(2, seed=3)]
    versions = [np.zeros(len(answer), dtype=np.int32) for answer in answers]
    versions[1][3 : len(turn)] = NOT_SAMPLED
    tree = answers_tree(
        "g", prompt, [len(answer) for answer in answers], np.concatenate(answers), versions=np.concatenate(versions)
    )
    moved = len(prompt) + len(answers[0])
    tree = replace(
        tree, media=[*media, *(Media(medium.item, medium.start + moved, medium.end + moved) for medium in later)]
    )
    directory = OneEngine(request.getfixturevalue("client"), [])
    (found,) = EngineTeacher(context, directory, 0, top_k=0).score([tree])  # type: ignore[arg-type]
    behind = len(prompt)
    for index, answer in enumerate(answers):
        items = media + (
            [Media(medium.item, medium.start + len(prompt), medium.end + len(prompt)) for medium in later]
            * (index == 1)
        )
        logits = seen.logits(model, prompt + answer, items).logits[0, len(prompt) - 1 : -1] / TEMPERATURE
        table = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].numpy()
        rows = slice(behind, behind + len(answer))
        expected = np.where(versions[index] >= 0, table, 0.0)
        assert float(np.abs(found.logprobs[rows] - expected).max()) <= 2e-5
        behind = rows.stop
