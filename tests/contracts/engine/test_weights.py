"""Tests that an engine serves a version only after its weights are loaded and attested."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from relax_core.contracts.engine import EngineError, SamplingParams
from relax_core.weights.transports import WeightGroupAddress
from relax_core.weights.version_file import tensors_digest
from relax_core.weights.weight_group import WeightGroup
from tests.contracts.engine.harness import Engine, hf_weights, make_model, prompts_of, publish, random_prompt
from tests.ports import free_port

GREEDY = SamplingParams(max_new_tokens=6, temperature=0.0)
PROMPT = random_prompt(12)


@pytest.fixture(scope="module")
def blank(launch: Any) -> Any:
    """Yields an engine that has no weights yet."""
    from dataclasses import replace

    from relax_core.engines.engine_process import EngineProcess

    process = EngineProcess.start(replace(launch, load_weights=False))
    yield Engine(process)
    process.stop(timeout_s=5.0)


def serves(engine: Engine, model: Any, version: int) -> None:
    """Checks that the engine has the log-probs of this model, under this version."""
    response = engine.generate(prompts_of(PROMPT), GREEDY)[0]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + response.output_ids.tolist()])).logits[0, len(PROMPT) - 1 : -1]
    expected = logits.log_softmax(-1).gather(-1, torch.tensor(response.output_ids.tolist())[:, None])[:, 0]
    assert float((expected - torch.tensor(response.logprobs)).abs().max()) <= 2e-5
    assert set(response.versions.tolist()) == {version}


def test_nothing_is_served_before_the_first_attested_weights(blank: Engine, tmp_path: Path) -> None:
    assert blank.client.model_info()["weight_version"] == "-1"
    assert blank.call("/health_generate", method="GET")[0] == 503
    model = make_model(None, seed=7)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(blank.generate, prompts_of(PROMPT), GREEDY)
        later = pool.submit(blank.generate, prompts_of(PROMPT, min_version=3), GREEDY)
        while blank.client.loads()["held"] < 2:
            assert not waiting.done() and not later.done()
        reply = blank.client.update_weights(publish(model, tmp_path / "w0", version=0))
        assert reply["weight_version"] == 0 and reply["stall_ms"] > 0.0
        assert waiting.result(60)[0].versions[0] == 0
        assert blank.client.loads()["held"] == 1 and not later.done()
        blank.client.update_weights(publish(model, tmp_path / "w3", version=3))
        assert later.result(60)[0].versions[0] == 3
    serves(blank, model, 3)


def test_a_wrong_digest_keeps_a_version_out(blank: Engine, tmp_path: Path) -> None:
    good = make_model(None, seed=8)
    blank.client.update_weights(publish(good, tmp_path / "good", version=4))
    manifest = publish(make_model(None, seed=9), tmp_path / "bad", version=5)
    data = bytearray((tmp_path / "bad").read_bytes())
    data[-1000] ^= 1
    (tmp_path / "bad").write_bytes(data)
    with pytest.raises(EngineError, match=r"409.*version 5, bucket 0.*version 4 stays in force"):
        blank.client.update_weights(manifest)
    with pytest.raises(EngineError, match=r"409.*manifest's own digest"):
        blank.client.update_weights(msgspec.structs.replace(manifest, digest="0" * 32))
    with pytest.raises(EngineError, match=r"409.*No such file"):
        blank.client.update_weights(msgspec.structs.replace(manifest, path=str(tmp_path / "gone")))
    serves(blank, good, 4)


def test_the_same_version_again_is_not_copied_again(blank: Engine, tmp_path: Path) -> None:
    manifest = publish(make_model(None, seed=8), tmp_path / "twice", version=6)
    assert blank.client.update_weights(manifest)["stall_ms"] > 0.0
    assert blank.client.update_weights(manifest)["stall_ms"] == 0.0


def test_an_update_needs_all_names_and_shapes(blank: Engine, tmp_path: Path) -> None:
    from relax_core.weights.version_file import write_weights

    model = make_model(None, seed=8)
    blank.client.update_weights(publish(model, tmp_path / "w", version=7))
    tensors = dict(hf_weights(model))
    tensors["model.norm.weight"] = torch.ones(65)
    tensors["stranger"] = torch.ones(2)
    del tensors["model.layers.1.mlp.up_proj.weight"]
    manifest = write_weights(tmp_path / "faulty", version=8, tensors=tensors.items())
    with pytest.raises(EngineError, match=r"400") as refusal:
        blank.client.update_weights(manifest)
    for words in (
        "missing: model.layers.1.mlp.up_proj.weight",
        "unknown: stranger",
        "misshapen: model.norm.weight is [65], the model has [64]",
        "version 7 stays in force",
    ):
        assert words in str(refusal.value)
    serves(blank, model, 7)


def test_from_disk(blank: Engine, tmp_path: Path) -> None:
    model = make_model(tmp_path, seed=10)
    blank.post("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "8"})
    serves(blank, model, 8)
    status, answer = blank.call("/update_weights_from_disk", {"model_path": "/nowhere", "weight_version": "9"})
    assert status == 400 and "no *.safetensors" in answer["error"]["message"]
    status, answer = blank.call("/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "default"})
    assert status == 400 and "versions are integers" in answer["error"]["message"]


def test_from_distributed_over_gloo(blank: Engine) -> None:
    """A session's weights are served only after the session's end, and only if the sender has the same digest."""
    model = make_model(None, seed=13)
    tensors = hf_weights(model)
    group: dict[str, Any] = {"group_name": "weights", "master_address": "127.0.0.1", "master_port": free_port()}
    body = {
        "names": [name for name, _ in tensors],
        "dtypes": ["float32"] * len(tensors),
        "shapes": [list(value.shape) for _, value in tensors],
        "group_name": "weights",
        "load_format": "flattened_bucket",
    }
    status, answer = blank.call("/update_weights_from_distributed", body)
    assert status == 400 and "/begin_weight_update" in answer["error"]["message"]
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(
            blank.post, "/init_weights_update_group", {**group, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
        )
        address = WeightGroupAddress(
            name="weights",
            address="127.0.0.1",
            port=group["master_port"],
            world_size=2,
            backend="gloo",
            timeout_s=60.0,
        )
        ours = WeightGroup.join(address, rank=0)
        joining.result(60)
        before = blank.version
        for digest in ("0" * 32, tensors_digest(tensors)):
            blank.post("/begin_weight_update")
            receiving = pool.submit(blank.post, "/update_weights_from_distributed", body)
            ours.send([torch.cat([value.contiguous().view(-1).view(torch.uint8) for _, value in tensors])])
            receiving.result(60)
            assert blank.version == before
            status, answer = blank.call("/end_weight_update", {"weight_version": "11", "digest": digest})
            assert status == (200 if digest != "0" * 32 else 409), answer
            assert status == 200 or "stays in force" in answer["error"]["message"]
    blank.post("/destroy_weights_update_group", {"group_name": "weights"})
    serves(blank, model, 11)
    status, answer = blank.call("/destroy_weights_update_group", {"group_name": "weights"})
    assert status == 400 and "unknown" in answer["error"]["message"]


def test_a_sender_that_joins_as_sglangs_trainers_do(blank: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang's ``init_custom_process_group`` uses torch's helper, so the names in the store must be equal."""
    import torch.distributed as dist
    from torch.distributed import distributed_c10d
    from torch.distributed.distributed_c10d import _new_process_group_helper

    # An earlier test of this process may have joined as a trainer rank. The trainer's groups require a proof from
    # ranks.
    monkeypatch.setattr(distributed_c10d, "ProcessGroupGloo", dist.ProcessGroupGloo)
    port = free_port()
    body = {
        "group_name": "theirs",
        "master_address": "127.0.0.1",
        "master_port": port,
        "rank_offset": 1,
        "world_size": 2,
        "backend": "gloo",
        "timeout_s": 60.0,
    }
    answers: list[tuple[int, Any]] = []
    thread = threading.Thread(target=lambda: answers.append(blank.call("/init_weights_update_group", body)))
    thread.start()
    deadline = timedelta(seconds=60)
    store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2, timeout=deadline))
    prefixed = dist.PrefixStore("theirs", store)
    _new_process_group_helper(size, rank, [], "gloo", prefixed, group_name="theirs", timeout=deadline)
    thread.join(60)
    assert answers and answers[0][0] == 200, answers
    blank.post("/destroy_weights_update_group", {"group_name": "theirs"})


def test_a_group_whose_trainer_never_comes_ends_in_words(blank: Engine) -> None:
    body = {
        "group_name": "alone",
        "master_address": "127.0.0.1",
        "master_port": free_port(),
        "rank_offset": 1,
        "world_size": 2,
        "timeout_s": 1.0,
    }
    status, answer = blank.call("/init_weights_update_group", body)
    assert status == 400 and "group alone: rank 1 of 2 joining" in answer["error"]["message"]


def test_a_version_can_be_renamed(blank: Engine) -> None:
    blank.post("/update_weight_version", {"new_version": "12"})
    assert blank.client.model_info()["weight_version"] == "12"


def test_weights_that_yield_nan_fail_the_request_and_nothing_else(blank: Engine, tmp_path: Path) -> None:
    model = make_model(None, seed=14)
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    blank.client.update_weights(publish(model, tmp_path / "nan", version=13))
    with pytest.raises(EngineError, match=r"version 13.*not finite"):
        blank.generate(prompts_of(PROMPT), GREEDY)
    status, answer = blank.call("/generate", json.loads('{"input_ids": [5], "sampling_params": {"max_new_tokens": 4}}'))
    assert status == 500 and "not finite" in answer["error"]["message"]
    sane = make_model(None, seed=15)
    blank.client.update_weights(publish(sane, tmp_path / "sane", version=14))
    serves(blank, sane, 14)
