"""Tests the program of env=verifiers: it plays a taskset of the real package verifiers through the endpoint."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from envs.verifiers import VerifiersConfig, command
from relax_core.data.tokenizer import PromptTokenizer
from tests.agents_env.environments import ROOT, VERIFIERS
from tests.data.chat_templates import FAMILIES, write_folder
from tests.rollout.agents.endpoint_harness import ScriptedPool, Served, serve

pytestmark = pytest.mark.agents
CALL = '<tool_call>\n{"name": "calc", "arguments": {"numbers": [2, 3]}}\n</tool_call>'
SUMS = ROOT / "examples" / "verifiers" / "sum_tasks.py"
ANSWER_S = 240.0


@pytest.mark.parametrize(("last", "reward"), [("It is 5.", 1.0), ("It is 6.", 0.0)])
def test_a_task_is_played_in_one_segment_and_rewarded_by_its_taskset(tmp_path: Path, last: str, reward: float) -> None:
    tokenizer = PromptTokenizer(write_folder(tmp_path / "model", FAMILIES["strips_thinking"]))
    pool = ScriptedPool(tokenizer, CALL, CALL, last)
    task, result = tmp_path / "task.json", tmp_path / "result.json"
    task.write_text(json.dumps({"prompt": "", "seed": 11}))  # task 2 of nine

    words = command(VerifiersConfig(taskset=str(SUMS), harness=str(SUMS)))

    async def scene(served: Served) -> None:
        given = {
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            "OPENAI_BASE_URL": f"{served.url}/v1",
            "OPENAI_API_KEY": served.key,
            "RELAX_TASK": str(task),
            "RELAX_RESULT": str(result),
        }
        process = await asyncio.create_subprocess_exec(VERIFIERS, *words[1:], env=given)
        try:
            assert await asyncio.wait_for(process.wait(), ANSWER_S) == 0
        finally:
            if process.returncode is None:
                process.kill()
        told = json.loads(result.read_text())
        assert told.get("reward") == reward, told
        assert "2 + 3 ?" in served.record.messages[0]["content"]
        tree = served.tree()
        assert [turn.response.output_ids.tolist() for turn in served.record.turns] == pool.given and len(
            pool.given
        ) == 3
        assert len(tree.episodes[0].leaves) == served.session.counts["segments"] == 1
        assert served.session.counts["foreign"] == 0 and served.record.orphan == 0

    serve(tokenizer, scene, pool, long_s=2 * ANSWER_S)
