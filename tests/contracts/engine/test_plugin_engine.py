"""Runs the contract tests on the plug-in engine of examples/plugins/transformers_engine.py, except tests of missing
features: truncation, scores and streams of single tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relax_core.config.compose import load_config
from relax_core.config.errors import ConfigError
from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.engines.build_client import build_client
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.registry import PluginError, find_engine
from tests.contracts.engine.harness import EOS, Engine, make_model, prompts_of, publish, random_prompt
from tests.contracts.engine.test_missing_samples import (  # noqa: F401
    test_a_response_goes_on_from_its_own_prefix,
    test_continued_samples_of_a_group_are_aborted_by_its_one_rid,
    test_some_samples_are_those_of_the_whole,
)
from tests.contracts.engine.test_seeds import (  # noqa: F401
    test_same_seed_same_tokens_alone_and_in_a_batch,
    test_samples_of_a_prompt_and_seeds_differ,
    test_the_same_request_twice_is_the_same_to_the_bit,
)
from tests.contracts.engine.test_tokens_and_logprobs import (  # noqa: F401
    test_a_long_prompt_goes_through_prefill_in_chunks,
    test_greedy_tokens_are_those_of_transformers_generate,
    transformers_logprobs,
)
from tests.contracts.engine.test_weights import serves

FILE = Path(__file__).resolve().parents[3] / "examples" / "plugins" / "transformers_engine.py"
WaitUntil = Callable[..., None]


@pytest.fixture(scope="module")
def engine(launch: EngineLaunch, model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Yields an engine that was started without weights and updated to version 0. Tests restore changed weights."""
    folder: Path = tmp_path_factory.mktemp("plugin")
    settings = replace(launch.engine, name=str(FILE))
    process = EngineProcess.start(replace(launch, engine=settings, load_weights=False, log_file=folder / "engine.log"))
    engine = Engine(process, str(FILE))
    assert engine.version == -1
    engine.client.update_weights(publish(model, folder / "w0", version=0))
    yield engine
    process.stop(timeout_s=5.0)
    assert process.poll() == 0, "it ends with its stdin"


@pytest.fixture(scope="module")
def model() -> Any:
    return make_model(None, seed=0)


@pytest.mark.parametrize(
    "changes",
    [{}, {"temperature": 0.7}, {"banned_token_ids": [EOS, 7, 8, 9]}, {"n": 1, "temperature": 0.0}],
    ids=["T1", "T0.7", "banned", "greedy"],
)
def test_logprobs_are_those_of_transformers(engine: Engine, model: Any, changes: dict[str, Any]) -> None:
    params = SamplingParams(**{"n": 4, "max_new_tokens": 12} | changes)
    prompts = [random_prompt(length, seed=length) for length in (1, 5, 33, 200)]
    responses = engine.generate(prompts_of(*prompts), params)
    assert len(responses) == len(prompts) * params.n
    for response in responses:
        assert len(response.output_ids) <= params.max_new_tokens
        assert not set(response.output_ids.tolist()) & set(params.banned_token_ids)
        expected = transformers_logprobs(model, prompts[response.prompt], response, params)
        assert response.logprobs == pytest.approx(expected.numpy(), abs=2e-5)


def test_a_version_is_served_once_its_digest_agrees(
    engine: Engine, model: Any, tmp_path: Path, wait_until: WaitUntil
) -> None:
    """A request for a newer version waits for this version. A running response continues with new weights."""
    newer, prompt = make_model(None, seed=7), random_prompt(12)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(engine.generate, prompts_of(prompt, min_version=1), SamplingParams(max_new_tokens=6))
        wait_until(lambda: engine.client.loads()["held"] == 1, what="the hold")
        long = SamplingParams(max_new_tokens=3000, banned_token_ids=[EOS])
        crossed = pool.submit(engine.generate, prompts_of(prompt), long)
        wait_until(lambda: engine.client.loads()["num_running_reqs"] == 1, what="the decoding")
        manifest = publish(newer, tmp_path / "w1", version=1)
        reply = engine.client.update_weights(manifest)
        assert reply["weight_version"] == 1 and reply["stall_ms"] > 0.0
        assert set(waiting.result(60)[0].versions.tolist()) == {1}
        engine.client.release_memory()  # running samples continue after the memory is resumed
        engine.client.resume_memory()
        engine.client.abort("prompt-0")
        (response,) = crossed.result(60)
    assert response.finish_reason == "abort" and response.versions.tolist() == sorted(response.versions.tolist())
    serves(engine, newer, 1)
    data = bytearray((tmp_path / "w1").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "w1").write_bytes(data)
    with pytest.raises(EngineError, match="digest"):
        engine.client.update_weights(msgspec.structs.replace(manifest, version=2))
    update = publish(make_model(None, seed=1, tied=False), tmp_path / "w3", version=3)
    with pytest.raises(EngineError, match="names or shapes are not those of the model"):
        engine.client.update_weights(update)
    serves(engine, newer, 1)
    engine.client.update_weights(publish(model, tmp_path / "w4", version=4))
    serves(engine, model, 4)


def test_a_client_that_hangs_up_leaves_nothing(engine: Engine, wait_until: WaitUntil) -> None:
    import asyncio

    async def leave() -> None:
        client = engine.new_client()
        stream = client.generate(prompts_of([5, 6]), SamplingParams(max_new_tokens=30000, banned_token_ids=[EOS]))
        asking = asyncio.ensure_future(anext(stream))
        await asyncio.to_thread(wait_until, lambda: engine.client.loads()["num_running_reqs"] == 1, what="it")
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await client.aclose()

    asyncio.run(leave())
    wait_until(lambda: engine.client.loads()["num_running_reqs"] == 0, what="the abort")


def test_what_it_cannot_serve_is_refused_in_words(engine: Engine) -> None:
    assert engine.call("/generate", {}, token="wrong")[0] == 401
    assert engine.call("/nowhere")[0] == 404
    with pytest.raises(EngineError, match="each 0 to 49"):
        engine.generate(prompts_of([50]), SamplingParams(max_new_tokens=2))
    with pytest.raises(EngineError, match="must fit into"):
        engine.generate(prompts_of([5]), SamplingParams(max_new_tokens=1 << 20))


def test_the_configuration_alone_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Relax makes the path absolute, and uses the plug-in's checks and transports like those of built-in engines."""
    monkeypatch.chdir(FILE.parents[2])
    name = "engine.name=examples/plugins/transformers_engine.py"
    assert load_config(["engine=plugin", name]).engine.name == str(FILE)
    for changed, words in (
        ("rollout.top_p=0.9", "rollout.top_p=0.9: this engine samples from the whole vocabulary"),
        ("engine.tp=2", "engine=transformers is one process on CPU cores"),
        ("engine.weight_transport=gloo", "takes shared_memory only"),
        ("+engine.flags.a=1", "engine.flags={'a': 1} is a key of engine=sglang only"),
    ):
        with pytest.raises(ConfigError) as caught:
            load_config(["engine=plugin", name, changed])
        assert words in str(caught.value)
    with pytest.raises(ConfigError) as missing:
        load_config(["engine=plugin", "engine.name=/nowhere/engine.py"])
    assert "engine.name=/nowhere/engine.py: no such file" in str(missing.value)


def test_a_client_of_another_class_is_refused(launch: EngineLaunch, tmp_path: Path) -> None:
    file = tmp_path / "wrong.py"
    text = "from relax_core.contracts.engine_kind import EngineSpec\n"
    file.write_text(text + "SPEC = EngineSpec(name='w', summary='', command=lambda s: [], client=lambda server: 7)\n")
    message = r"client\(server\) returned a int. Return an EngineClient"
    with pytest.raises(ValueError, match=message):
        build_client(
            replace(launch.engine, name=str(file)), "http://x", model_folder=tmp_path, token_file=launch.token_file
        )
    file.with_name("none.py").write_text("SPEC = 3\n")
    with pytest.raises(PluginError, match=r"SPEC of type int. Set SPEC = EngineSpec"):
        find_engine(str(file.with_name("none.py")))
    assert find_engine("embedded").client is None and EngineClient is not None
