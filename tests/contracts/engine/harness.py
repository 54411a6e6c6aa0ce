"""Helpers for tests of the engine contract: tiny models, raw HTTP calls, and readers of answers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams, WeightManifest
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.generate_messages import StreamEnd
from relax_core.engines.protocol.stop_strings import StopTable
from relax_core.engines.sglang.sglang_client import SglangClient
from relax_core.weights.version_file import write_weights

ROOT = Path(__file__).resolve().parents[3]
SGLANG_PYTHON = ROOT / ".venv-sglang/bin/python"
SGLANG = pytest.param("sglang", marks=pytest.mark.sglang)
ENGINES = ("embedded", SGLANG)
embedded_only = pytest.mark.parametrize("engine", ["embedded"], indirect=True)
sglang_only = pytest.mark.parametrize("engine", [SGLANG], indirect=True)
TOKEN = "token-of-the-run"
VOCAB = 50
EOS = 3
CONTEXT = 32768
LONG = 30000  # tokens; decoding takes many seconds, so a test can act during a request
GONE_S = 2.0


class Started:
    """Starts engines with temporary files in one folder, so a test can check the remaining files.

    Use it as a context manager. In shared memory it checks names that SGLang chooses, and names that contain the name
    of an engine's folder.
    """

    def __enter__(self) -> Started:
        self._temporary = tempfile.TemporaryDirectory(prefix="e")  # a short path, because of socket names
        self._before = set(os.listdir("/dev/shm"))
        self._names = ["sem.mp-", "psm_", "sglang_"]
        return self

    def __exit__(self, *_: object) -> None:
        self._temporary.cleanup()

    def start(self, launch: EngineLaunch) -> EngineProcess:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", self._temporary.name)
            patch.setattr(tempfile, "tempdir", self._temporary.name)
            process = EngineProcess.start(launch)
        self._names += os.listdir(self._temporary.name)
        return process

    def left(self) -> set[str]:
        """Returns new files that remain.

        While a process creates a semaphore, the semaphore's name is in shared memory for a moment.
        """
        deadline = time.monotonic() + GONE_S
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(0.05)
        return found

    def _found(self) -> set[str]:
        new = set(os.listdir("/dev/shm")) - self._before
        shared = {name for name in new if any(part in name for part in self._names)}
        return set(os.listdir(self._temporary.name)) | shared


def make_model(folder: Path | None, *, seed: int, tied: bool = True) -> Any:
    """Makes a random Qwen3 with distributions far from flat, and saves it if a folder is given."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    return _spread(Qwen3ForCausalLM(config), folder)


def make_moe_model(folder: Path | None, *, seed: int) -> Any:
    """Makes a random Qwen3-MoE of 8 experts, 2 per token. The head is untied, because SGLang has no tied head."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=EOS,
        pad_token_id=0,
        bos_token_id=None,
    )
    return _spread(Qwen3MoeForCausalLM(config), folder)


def _spread(model: Any, folder: Path | None) -> Any:
    """Moves the model's distributions away from flat, and saves the model if a folder is given."""
    model = model.float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1.0 + 0.2 * torch.randn_like(parameter))
            else:
                parameter.mul_(3.0)
    if folder is not None:
        model.save_pretrained(folder)
    return model


def hf_weights(model: Any) -> list[tuple[str, torch.Tensor]]:
    """Returns the model's weights in the form that a trainer exports: a tied head only once."""
    tied = model.config.tie_word_embeddings
    return [(name, value) for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")]


def publish(model: Any, path: Path, *, version: int) -> WeightManifest:
    return write_weights(path, version=version, tensors=hf_weights(model))


def sglang_client(
    url: str,
    *,
    token: str = TOKEN,
    control_timeout_s: float = 30.0,
    kind: type[SglangClient] = SglangClient,
    stops: StopTable | None = None,
    vocab_size: int = VOCAB,
    has_states: bool = False,
) -> SglangClient:
    """Returns a client of a server that this suite started with the model of `make_model`."""
    return kind(
        url,
        token,
        request_timeout_s=60.0,
        control_timeout_s=control_timeout_s,
        ranks=1,
        vocab_size=vocab_size,
        seeds=True,
        stops=stops,
        has_states=has_states,
    )


@dataclass
class Engine:
    process: EngineProcess
    kind: str = "embedded"
    stops: StopTable | None = None
    vocab_size: int = VOCAB
    has_states: bool = False
    client: EngineClient = field(init=False)

    def __post_init__(self) -> None:
        self.client = self.new_client()

    @property
    def version(self) -> int:
        """Returns the version of the weights that the engine serves."""
        return int(self.client.model_info()["weight_version"])

    def flush(self) -> None:
        """Empties SGLang's prefix cache, because raw requests of different weight versions share this cache."""
        deadline = time.monotonic() + 30.0
        while self.call("/flush_cache")[0] != 200:  # requests are still running
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def new_client(self, token: str = TOKEN) -> EngineClient:
        if self.kind == "sglang":
            return sglang_client(
                self.process.url,
                token=token,
                stops=self.stops,
                vocab_size=self.vocab_size,
                has_states=self.has_states,
            )
        return EngineClient(self.process.url, token, request_timeout_s=60.0, control_timeout_s=30.0)

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.process.port, timeout=60.0)

    def call(
        self,
        path: str,
        payload: Any = None,
        *,
        method: str = "POST",
        token: str | None = TOKEN,
        body: bytes | None = None,
    ) -> tuple[int, Any]:
        """Sends one request on a new connection. Returns the status and the decoded response."""
        connection = self.connection()
        headers = {"Content-Type": "application/json"}
        if token is not None:
            headers["Authorization"] = f"Bearer {token}"
        data = json.dumps({} if payload is None else payload).encode() if body is None else body
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        status, answer = response.status, response.read()
        connection.close()
        try:
            return status, json.loads(answer)
        except ValueError:  # some responses of SGLang are plain text or empty
            return status, answer.decode()

    def post(self, path: str, payload: Any = None) -> Any:
        """Sends a request that must succeed, and returns the response."""
        status, answer = self.call(path, payload)
        assert status == 200, answer
        return answer

    def generate(
        self,
        prompts: Sequence[PromptRequest],
        params: SamplingParams,
        *,
        on_end: Callable[[StreamEnd], None] | None = None,
    ) -> list[Generated]:
        """Returns all responses, sorted by prompt and sample."""

        async def collect() -> list[Generated]:
            client = self.new_client()
            try:
                return [response async for response in client.generate(prompts, params, on_end=on_end)]
            finally:
                await client.aclose()

        return sorted(asyncio.run(collect()), key=lambda response: (response.prompt, response.sample))

    @contextmanager
    def stream(self, payload: dict[str, Any]) -> Iterator[Iterator[dict[str, Any]]]:
        """Yields the server-sent events of a /generate request. Leaving the block early closes the connection."""
        connection = self.connection()
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {TOKEN}"}
        connection.request("POST", "/generate", json.dumps({**payload, "stream": True}).encode(), headers)
        response = connection.getresponse()
        assert response.status == 200, response.read()

        def events() -> Iterator[dict[str, Any]]:
            while line := response.readline():
                data = line.strip().removeprefix(b"data: ")
                if data and data != b"[DONE]":
                    yield json.loads(data)

        try:
            yield events()
        finally:
            response.close()
            connection.close()


def long_request(rid: str, *, tokens: int = LONG, **fields: Any) -> dict[str, Any]:
    """Returns a /generate body for one sample that ends only after ``tokens`` tokens."""
    sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 1.0, "sampling_seed": 1}
    return {"rid": rid, "input_ids": [5, 6, 7], "sampling_params": sampling, "return_logprob": True, **fields}


def prompts_of(*token_ids: list[int], seed: int = 11, min_version: int = 0) -> list[PromptRequest]:
    return [
        PromptRequest(rid=f"prompt-{index}", input_ids=ids, sampling_seed=seed + index, min_version=min_version)
        for index, ids in enumerate(token_ids)
    ]


def random_prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(4, VOCAB, (length,), generator=generator).tolist()
