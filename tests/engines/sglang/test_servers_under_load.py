"""Two servers on one host get new weights, sleep, wake and abort while requests run. Every token has its version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.engines.engine_process import EngineLaunch
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.tools.tiny_media import write_published
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.version_file import write_weights
from tests.contracts.engine.harness import EOS, Engine, Started, make_model, publish, random_prompt
from tests.vision_models import HYBRIDS, Seen, make_tiny_vision_model, text

pytestmark = pytest.mark.sglang
REACH = 2e-5
CONTEXT = 512
NEW = 40
PROMPTS = 3  # prompts of one call
CALLERS = 2  # per server
ORDERS = ("update", "sleep", "update", "sleep with weights", "abort", "update")
WAIT_S = 120.0


@dataclass
class Served:
    """Holds a server and everything that its responses are compared with."""

    engine: Engine
    params: SamplingParams
    prompt: Callable[[int], list[int]]
    send: Callable[[int, EngineClient], Any]  # publishes a version to the server, and returns its model
    logits: Callable[[Any, list[int]], torch.Tensor]
    models: dict[int, Any]

    def expected(self, version: int, ids: list[int], new: int) -> torch.Tensor:
        """Returns transformers' log-probs of the last ``new`` ids."""
        with torch.no_grad():
            logits = self.logits(self.models[version], ids)[-new - 1 : -1].clone()
        logits[:, self.params.banned_token_ids] = float("-inf")
        return logits.log_softmax(-1).gather(-1, torch.tensor(ids[-new:])[:, None])[:, 0]

    def follow(self, orders: Sequence[str]) -> None:
        for order in orders:
            time.sleep(0.7)  # so the requests of several calls run at each order
            version = max(self.models) + 1
            client = self.engine.new_client()
            if order == "abort":
                client.abort()
                continue
            if order != "update":
                client.release_memory(weights=order == "sleep with weights")
                time.sleep(0.3)
            if order == "sleep with weights":
                client.resume_weights()
            self.models[version] = self.send(version, client)
            if order != "update":
                client.resume_memory()

    def load(self, ended: threading.Event, caller: int) -> list[tuple[PromptRequest, Generated]]:
        found: list[tuple[PromptRequest, Generated]] = []
        call = 0
        while not ended.is_set():
            call += 1
            requests = [
                PromptRequest(
                    rid=f"{caller}-{call}-{index}",
                    input_ids=self.prompt(1000 * caller + PROMPTS * call + index),
                    sampling_seed=call * PROMPTS + index,
                    min_version=max(self.models) if call % 2 else 0,
                )
                for index in range(PROMPTS)
            ]
            responses = self.engine.generate(requests, self.params)
            assert len(responses) == PROMPTS * self.params.n, "no sample is lost"
            found += [(requests[response.prompt], response) for response in responses]
        return found


def spans(versions: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns the version, start and end of each run of equal versions."""
    edges = [0, *(at for at in range(1, len(versions)) if versions[at] != versions[at - 1]), len(versions)]
    return [(versions[start], start, end) for start, end in pairwise(edges)]


def dense(launch: EngineLaunch, started: Started, folder: Path) -> Served:
    first = make_model(folder / "model", seed=100)
    engine = Engine(started.start(replace(launch, model_folder=folder / "model", log_file=folder / "log")), "sglang")

    def send(version: int, client: EngineClient) -> Any:
        model = make_model(None, seed=100 + version)
        client.update_weights(publish(model, folder / f"v{version}", version=version))
        return model

    return Served(
        engine,
        SamplingParams(n=2, max_new_tokens=NEW, banned_token_ids=[EOS]),
        lambda number: random_prompt(5 + number % 30, seed=number),
        send,
        lambda model, ids: model(torch.tensor([ids])).logits[0],
        {0: first},
    )


def hybrid(launch: EngineLaunch, started: Started, folder: Path) -> Served:
    first = make_tiny_vision_model(folder / "model", name=HYBRIDS[0], seed=200)
    seen = Seen(folder / "model", folder / "media")
    process = started.start(replace(launch, model_folder=folder / "model", log_file=folder / "log"))
    special = seen.tower
    engine = Engine(process, "sglang", vocab_size=first.config.get_text_config().vocab_size, has_states=True)

    def send(version: int, client: EngineClient) -> Any:
        model = make_tiny_vision_model(None, name=HYBRIDS[0], seed=200 + version)
        (folder / f"v{version}").mkdir()
        write_published(model, folder / f"v{version}")
        tensors = read_safetensors(folder / f"v{version}")
        client.update_weights(write_weights(folder / f"v{version}/version.bin", version=version, tensors=tensors))
        return model

    media = [special.image_token_id, special.video_token_id, special.vision_start_token_id, special.vision_end_token_id]
    return Served(
        engine,
        SamplingParams(n=2, max_new_tokens=NEW, banned_token_ids=[*media, EOS]),
        lambda number: text(5 + number % 30, seed=number),
        send,
        lambda model, ids: seen.logits(model, ids, []).logits[0],
        {0: first},
    )


@pytest.fixture(scope="module")
def servers(sglang_launch: EngineLaunch, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Served]]:
    """Starts two servers on this host, each with its own model. Their versions have the same numbers."""
    engine = replace(sglang_launch.engine, context_length=CONTEXT, max_total_tokens=32 * CONTEXT)
    launch = replace(sglang_launch, engine=engine)
    with Started() as started:
        folders = [tmp_path_factory.mktemp(name) for name in ("dense", "hybrid")]
        (folders[0] / "model").mkdir()
        found = {"dense": dense(launch, started, folders[0]), "hybrid": hybrid(launch, started, folders[1])}
        yield found
        for served in found.values():
            served.engine.process.stop(timeout_s=10.0)
        assert not started.left()


def test_every_token_has_the_version_of_its_server(servers: Mapping[str, Served]) -> None:
    """Compares every token with transformers' model of its server and version.

    A sample that was paused in place continues on keys and values of the old weights: for the dense model only the
    tokens up to the first change can be compared. A model with recurrent states prefills again, so all can.
    """
    ended = threading.Event()
    with ThreadPoolExecutor() as pool:
        loads = {
            name: [pool.submit(served.load, ended, caller) for caller in range(CALLERS)]
            for name, served in servers.items()
        }
        ordered = [pool.submit(served.follow, ORDERS) for served in servers.values()]
        try:
            for order in ordered:
                order.result(WAIT_S)
            time.sleep(1.0)
        finally:
            ended.set()
        found = {name: [pair for load in loads[name] for pair in load.result(WAIT_S)] for name in servers}
    for name, served in servers.items():
        assert served.engine.version == max(served.models) == len(ORDERS) - 1
        seen: set[int] = set()
        changed = aborted = 0
        for request, response in found[name]:
            versions = response.versions.tolist()
            assert len(versions) == len(response.output_ids) == len(response.logprobs)
            assert versions == sorted(versions) and set(versions) <= set(served.models)
            assert not versions or versions[0] >= request.min_version
            aborted += response.finish_reason == "abort"
            assert response.finish_reason == "abort" or len(versions) == NEW
            seen |= set(versions)
            changed += len(set(versions)) > 1
            ids = request.input_ids + response.output_ids.tolist()
            for version, start, end in spans(versions) if name == "hybrid" else spans(versions)[:1]:
                known = ids[: len(request.input_ids) + end]
                gap = served.expected(version, known, end - start) - torch.tensor(response.logprobs[start:end])
                assert float(gap.abs().max()) <= REACH, (name, version, start, end)
        print(f"{name}: {len(found[name])} responses, {changed} over a change of weights, {aborted} aborted")
        assert seen == set(served.models) and changed > 0
        assert 0 < aborted <= CALLERS * PROMPTS * served.params.n, "aborted samples are reported"
