"""Tests a judge in a real embedded engine: its text, its context limit, special tokens in texts, and kill -9."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from relax_core.config.compose import load_config
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_pool import EnginePool
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.preflight import settle
from relax_core.roles.engine_directory import engine_client
from relax_core.roles.judge_engine import JudgeEngineOwner
from relax_core.rollout.judges.judge_choice import judge_plan
from relax_core.rollout.judges.judge_pool import RunJudge
from relax_core.rollout.judges.judge_servers import JudgeEngines, JudgeRefused
from tests.roles.test_engine_owner import context_of

VARIABLES = {"question": "q", "reference": "r"}
LONG_S = 120.0


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 3 * LONG_S))


async def together(server: JudgeEngines, client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks that concurrent prompts share a request, and that a refused prompt does not fail other prompts."""
    sizes: list[int] = []
    generate, tokens = client.generate, server.tokens

    def counted(prompts: Sequence[PromptRequest], *words: Any, **named: Any) -> AsyncIterator[Generated]:
        sizes.append(len(prompts))
        return generate(prompts, *words, **named)

    monkeypatch.setattr(client, "generate", counted)
    monkeypatch.setattr(server, "tokens", lambda text: [10**6] if text == "unknown" else tokens(text))

    async def answers(*texts: str) -> list[Any]:
        return await asyncio.gather(
            *(server.answer(text, seed=1, temperature=0.0) for text in texts), return_exceptions=True
        )

    texts = [f"rev {number}" for number in range(6)]
    at_once = await answers(*texts)
    assert at_once == [(await answers(text))[0] for text in texts] and sizes == [6, *[1] * 6]
    refused, answered = await answers("unknown", texts[0])
    assert isinstance(refused, JudgeRefused) and answered == at_once[0]
    given_up = asyncio.create_task(answers("rev 1"))
    await asyncio.sleep(0.01)
    given_up.cancel()
    assert await answers("rev 1") == [at_once[1]]
    monkeypatch.undo()


async def assert_prompts_are_plain(judge: RunJudge, server: JudgeEngines, *, tokens: int, context: int) -> None:
    """Checks that texts never become special tokens, and that a text too long for the context is refused."""
    long = await judge.verdict(VARIABLES | {"response": "1" * context})
    assert long.value is None and f"has {tokens + context} tokens" in long.reason, long
    stop = server._tokenizer.stop_token_ids[0]
    plain = server.tokens(f"1{server._tokenizer.token_text(stop)}2")
    assert plain.count(stop) == server.tokens("12").count(stop), "the name of a special token is plain text"


def test_a_judge_answers_from_its_own_engine_and_survives_kill_9(
    tmp_path: Path, wait_until: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "prompt.jinja").write_text("{{ response }}")
    config = load_config(
        [
            "reward=genrm",
            "reward.judges.main.model=tiny_qwen3",
            f"reward.judges.main.prompt={tmp_path / 'prompt.jinja'}",
            r"reward.judges.main.parse='(?P<verdict>\d+)'",
            "reward.judges.main.max_new_tokens=8",
            "reward.judges.main.timeout_s=100",
            "mode=colocate",
        ],
        settle=settle,
    )
    context = context_of(config, tmp_path)
    context = replace(context, judge_folders={"main": context.model_folder}, model_folder=tmp_path / "of the policy")
    plan = judge_plan(config)
    assert plan is not None
    setup = plan.judges["main"]
    owner = JudgeEngineOwner("judge_engine-0", context, 0)

    async def work() -> None:
        client = engine_client(owner.context, await asyncio.to_thread(owner.endpoint, LONG_S))
        engine = owner.context.config.engine

        async def client_for(number: int, anew: bool) -> EngineClient:
            return client

        pool = EnginePool(1, client_for, timeout_s=LONG_S)
        server = JudgeEngines(
            "main", setup.settings, pool, model_folder=owner.context.model_folder, context_tokens=engine.context_tokens
        )
        judge = RunJudge("main", setup, server, seed=0)
        asked = VARIABLES | {"response": "rev 123"}

        ids = server.tokens("rev 123")
        request = PromptRequest(rid="direct", input_ids=ids, sampling_seed=1)
        stop = server._tokenizer.stop_token_ids
        params = SamplingParams(max_new_tokens=8, temperature=0.0, stop_token_ids=stop)
        (own,) = [response async for response in client.generate([request], params)]
        said = server._tokenizer.decode([token for token in own.output_ids.tolist() if token not in stop])
        verdict = await judge.verdict(asked)
        assert verdict.text == said and verdict.value == float(said), "greedy decoding from the same tokens"

        await assert_prompts_are_plain(judge, server, tokens=len(ids) - 7, context=engine.context_tokens)
        await together(server, client, monkeypatch)
        await asyncio.to_thread(
            wait_until, lambda: client.loads()["kv_cache_bytes"] == 0, what="an idle judge gives its cache up"
        )
        os.kill(owner.child_pids[0], signal.SIGKILL)
        hasty = RunJudge("main", replace(setup, settings=replace(setup.settings, timeout_s=0.2)), server, seed=0)
        gone = await hasty.verdict(asked)
        assert gone.value is None and gone.reason == "judge main: no verdict within 0.2 s"
        assert await judge.verdict(asked) == verdict, "after the restart"
        assert owner.restarts == 1
        await client.aclose()

    try:
        run(work())
    finally:
        owner.request_stop()
        assert owner.join(LONG_S)
