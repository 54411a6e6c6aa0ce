"""An engine that decodes with Hugging Face transformers, for any dense model of transformers.

    python -m relax_core engine=plugin engine.name=examples/plugins/transformers_engine.py

The first part is the plug-in that a run loads, the second is the server process that it starts. The server decodes one
prompt at a time, with all samples of the prompt together. New weights are loaded between two tokens; running responses
continue with them and report the weight version of each token.
"""

from __future__ import annotations

import hmac
import json
import os
import queue
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from relax_core.contracts.engine import FinishReason, WeightManifest
from relax_core.contracts.engine_kind import EngineSpec, EngineStart


# -- the plug-in ------------------------------------------------------------------------------------------------------
def command(start: EngineStart) -> list[str]:
    told = {
        "model": str(start.model_folder),
        "host": start.host,
        "listener": start.listener,  # a socket held by the run, so that no other process can bind the port
        "token_file": str(start.token_file),
        "dtype": start.dtype,
        "context": start.engine.context_tokens,
        "threads": start.engine.threads,
        "version": 0 if start.load_weights else -1,  # -1: serves nothing before the first update
    }
    return [sys.executable, "-P", str(Path(__file__).resolve()), json.dumps(told)]


def problems(config: Any) -> Iterator[str]:
    """Yields unsupported settings, so that a run with them is refused before it starts."""
    rollout = config.rollout
    for key, value, off in (("top_p", rollout.top_p, 1.0), ("top_k", rollout.top_k, -1), ("min_p", rollout.min_p, 0.0)):
        if value != off:
            yield f"rollout.{key}={value}: this engine samples from the whole vocabulary. Use rollout.{key}={off:g}."
    if rollout.stop:
        yield f"rollout.stop={rollout.stop}: this engine has no stop strings. Drop it."
    if config.algo.routing_replay:
        yield "algo.routing_replay=true: this engine returns no routed experts. Use algo.routing_replay=false."
    if getattr(config.algo, "served_by", "") == "engine":
        yield "algo.served_by=engine: this engine cannot score given tokens. Use algo.served_by=forward."


SPEC = EngineSpec(
    name="transformers",
    summary="Hugging Face transformers, one process, one prompt at a time.",
    command=command,
    problems=problems,
    transports=frozenset({"shared_memory"}),
    memory_mib=600,
    takes_listener=True,
)


# -- the server: one thread decodes -----------------------------------------------------------------------------------
class Sampling(msgspec.Struct):
    """Holds sampling parameters by SGLang's names. `problems` refuses settings that need other fields."""

    n: int = 1
    max_new_tokens: int = 128
    temperature: float = 1.0
    stop_token_ids: list[int] = []


class GenerateBody(msgspec.Struct):
    """Holds the body of /generate from the client of every engine; the lists have one entry for each prompt."""

    rid: list[str]
    input_ids: list[list[int]]
    sampling_params: Sampling | list[Sampling]
    sampling_seed: list[int]
    min_version: list[int]
    banned_token_ids: list[int] = []
    samples: list[list[int] | None] = []
    generated: list[int] = []


@dataclass(eq=False)
class Response:
    """Holds one sample: its tokens and log-probs so far, and its changes of weight version (first token, version)."""

    sample: int
    random: np.random.Generator
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    marks: list[tuple[int, int]] = field(default_factory=list)


@dataclass(eq=False)
class Job:
    """Holds one prompt. ``running`` are its unfinished samples, in the order of the rows of ``cache``."""

    place: int
    rid: str
    prompt: list[int]
    params: Sampling
    min_version: int
    banned: list[int]
    running: list[Response]
    finished: queue.SimpleQueue[tuple[Job, Response, FinishReason]]
    cache: Any = None


class Decoder(threading.Thread):
    """Owns the model. All changes of it run in this thread between two tokens: see `post`."""

    def __init__(self, model: Any, *, version: int, end_ids: tuple[int, ...]) -> None:
        super().__init__(name="decode", daemon=True)
        self.version, self.digest, self.released = version, "", False
        self.jobs: list[Job] = []
        self._model, self._end_ids = model, end_ids
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()

    def post(self, action: Callable[[], Any]) -> Any:
        """Runs ``action`` between two tokens; returns its result or raises its error."""
        future: Future[Any] = Future()

        def act() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # raised in the caller
                future.set_exception(error)

        self._inbox.put(act)
        return future.result()

    def run(self) -> None:
        try:
            while True:
                ready = [job for job in self.jobs if job.min_version <= self.version and not self.released]
                if not ready or not self._inbox.empty():
                    self._inbox.get()()
                else:
                    self._step(ready[0])
        except BaseException as error:  # the engine's owner starts another process
            print(f"transformers engine: the decode thread died: {error!r}", file=sys.stderr, flush=True)
            os._exit(1)

    def _step(self, job: Job) -> None:
        """Samples one token of every running sample of the job."""
        import torch

        ids = [job.prompt + response.ids if job.cache is None else response.ids[-1:] for response in job.running]
        with torch.inference_mode():
            found = self._model(torch.tensor(ids), past_key_values=job.cache, use_cache=True, logits_to_keep=1)
            job.cache = found.past_key_values
            logits = found.logits[:, -1].float()
            logits[:, job.banned] = float("-inf")
            logprobs = (logits / (job.params.temperature or 1.0)).log_softmax(-1)
            sums = logprobs.double().exp().cumsum(-1).numpy()
        stays = []
        for row, response in enumerate(job.running):
            if job.params.temperature == 0.0:
                token = int(logits[row].argmax())
            else:
                token = int(sums[row].searchsorted(response.random.random() * sums[row, -1], side="right"))
            if not response.marks or response.marks[-1][1] != self.version:
                response.marks.append((len(response.ids), self.version))
            response.ids.append(token)
            response.logprobs.append(float(logprobs[row, token]))
            if token in self._end_ids or token in job.params.stop_token_ids:
                job.finished.put((job, response, "stop"))
            elif len(response.ids) >= job.params.max_new_tokens:
                job.finished.put((job, response, "length"))
            else:
                stays.append(row)
        if not stays:
            self.jobs.remove(job)
        elif len(stays) < len(job.running):
            job.running = [job.running[row] for row in stays]
            job.cache.batch_select_indices(torch.tensor(stays))

    # -- actions, for `post` ------------------------------------------------------------------------------------------
    def abort(self, chosen: Callable[[Job], bool]) -> None:
        for job in [job for job in self.jobs if chosen(job)]:
            self.jobs.remove(job)
            for response in job.running:
                job.finished.put((job, response, "abort"))

    def release_memory(self) -> None:
        """Frees keys and values, which are recomputed from the tokens when the jobs continue."""
        self.released = True
        for job in self.jobs:
            job.cache = None

    def resume_memory(self) -> None:
        self.released = False

    def update(self, manifest: WeightManifest) -> dict[str, Any]:
        """Loads a published version. Raises ValueError, with nothing changed, if the file's digests or tensors are
        wrong. Returns ``stall_ms``, the milliseconds for which decoding paused.
        """
        import torch

        from relax_core.weights.version_file import read_weights

        began = time.perf_counter()
        if (manifest.version, manifest.digest) != (self.version, self.digest):
            own = dict(self._model.named_parameters())  # A tied head is not a separate parameter.
            new = dict(read_weights(manifest))
            if {name: value.shape for name, value in own.items()} != {
                name: tensor.shape for name, tensor in new.items()
            }:
                raise ValueError(f"weights {manifest.version}: names or shapes are not those of the model")
            with torch.no_grad():
                for name, value in own.items():
                    value.copy_(new[name])
            self.version, self.digest = manifest.version, manifest.digest
        stall_ms = 1e3 * (time.perf_counter() - began)
        return {"weight_version": self.version, "digest": self.digest, "stall_ms": stall_ms}


# -- the server: HTTP -------------------------------------------------------------------------------------------------
def jobs_of(body: GenerateBody, *, context: int, vocabulary: int) -> list[Job]:
    """Returns a job for each prompt of a call. Raises ValueError for a body that cannot be served."""
    jobs, finished = [], queue.SimpleQueue[tuple[Job, Response, FinishReason]]()
    for place, (rid, ids, seed) in enumerate(zip(body.rid, body.input_ids, body.sampling_seed, strict=True)):
        params = body.sampling_params if isinstance(body.sampling_params, Sampling) else body.sampling_params[place]
        if not ids or not all(0 <= token_id < vocabulary for token_id in (*ids, *body.banned_token_ids)):
            raise ValueError(f"input_ids[{place}]: give one token or more, each 0 to {vocabulary - 1}")
        if params.max_new_tokens < 1 or len(ids) + params.max_new_tokens > context:
            raise ValueError(f"input_ids[{place}]: {len(ids)} tokens and max_new_tokens must fit into {context}")
        asked = (body.samples[place] if body.samples else None) or range(params.n)
        running = [Response(sample, np.random.default_rng([seed, sample])) for sample in asked]
        for response in running:
            response.random.random(body.generated[place] if body.generated else 0)  # skips used numbers
        least = max(0, body.min_version[place])
        jobs.append(Job(place, rid, ids, params, least, body.banned_token_ids, running, finished))
    return jobs


def frame_of(job: Job, response: Response, reason: FinishReason) -> bytes:
    """Returns a finished response in the format of `EngineClient`."""
    from relax_core.engines.protocol.generate_messages import FLOAT32, INT32, Finished, VersionSpan, encode_frames

    ends = [start for start, _ in response.marks[1:]] + [len(response.ids)]
    frame = Finished(
        rid=job.rid,
        prompt=job.place,
        sample=response.sample,
        output_ids=np.array(response.ids, INT32).tobytes(),
        logprobs=np.array(response.logprobs, FLOAT32).tobytes(),
        weight_versions=[VersionSpan(start, end, ver) for (start, ver), end in zip(response.marks, ends, strict=False)],
        finish_reason=reason,
    )
    return encode_frames([frame])


def handler(decoder: Decoder, *, token: str, context: int, model: Any) -> type[BaseHTTPRequestHandler]:
    """Returns the class that answers requests; each connection has a thread."""
    from relax_core.engines.protocol.server_proof import PATH as PROOF
    from relax_core.engines.protocol.server_proof import proof_answer

    def loads() -> dict[str, Any]:
        held = sum(len(job.running) for job in decoder.jobs if job.min_version > decoder.version)
        count = sum(len(job.running) for job in decoder.jobs)
        return {"loads": [{"num_running_reqs": count - held, "num_waiting_reqs": held, "held": held}]}

    def abort(body: Any) -> None:
        decoder.abort(lambda job: bool(body.get("abort_all")) or job.rid == body.get("rid"))

    telling: dict[str, Callable[[], dict[str, Any]]] = {
        "/ready": lambda: {"status": "ok"},
        "/model_info": lambda: {"model_path": model.name_or_path, "weight_version": str(decoder.version)},
        "/v1/loads": loads,
    }
    changing: dict[str, Callable[[Any], dict[str, Any] | None]] = {
        "/abort_request": abort,
        "/release_memory_occupation": lambda body: decoder.release_memory(),
        "/resume_memory_occupation": lambda body: decoder.resume_memory(),
        "/update_weights_from_shared_memory": lambda body: decoder.update(msgspec.convert(body, WeightManifest)),
    }

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path, _, query = self.path.partition("?")
            if path == PROOF:
                proof = proof_answer(token, query=query.encode(), address=self.connection.getsockname())
                return self._answer(400, "nonce: wrong") if proof is None else self._send(200, "text/plain", proof)
            if self.path not in telling:
                return self._answer(404, f"{self.path}: no such route")
            self._answer(200, telling[self.path]())

        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            shown = (self.headers.get("Authorization") or "").encode("latin-1")
            if not hmac.compare_digest(shown, f"Bearer {token}".encode()):
                return self._answer(401, f"{self.path}: wants the run's bearer token in the Authorization header")
            if self.path != "/generate" and self.path not in changing:
                return self._answer(404, f"{self.path}: no such route")
            try:
                if self.path == "/generate":
                    body = msgspec.json.decode(data, type=GenerateBody)
                    jobs = jobs_of(body, context=context, vocabulary=model.config.vocab_size)
                else:
                    told = msgspec.json.decode(data or b"{}", type=dict[str, Any])
                    reply = decoder.post(lambda: changing[self.path](told))
                    return self._answer(200, reply or {"success": True})
            except (ValueError, IndexError, OSError, RuntimeError) as error:
                return self._answer(400, f"{self.path}: {error}")
            self._stream(jobs)

        def _stream(self, jobs: list[Job]) -> None:
            """Sends each response when it is finished, until all are sent or the client has disconnected."""
            self.send_response(200)
            self.send_header("Content-Type", "application/msgpack")
            self.send_header("Connection", "close")
            self.end_headers()
            left = sum(len(job.running) for job in jobs)
            decoder.post(lambda: decoder.jobs.extend(jobs))
            while left:
                try:
                    self.wfile.write(frame_of(*jobs[0].finished.get(timeout=0.1)))
                    left -= 1
                except queue.Empty:
                    if select.select([self.connection], [], [], 0)[0] and not self.connection.recv(1, socket.MSG_PEEK):
                        break
                except OSError:
                    break
            decoder.post(lambda: decoder.abort(jobs.__contains__))  # after a disconnect; else there is no job

        def _answer(self, status: int, reply: dict[str, Any] | str) -> None:
            data = msgspec.json.encode({"error": {"message": reply}} if isinstance(reply, str) else reply)
            self._send(status, "application/json", data)

        def _send(self, status: int, kind: str, data: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            """Logs no requests: one per second would fill the log."""

    return Handler


def end_with_owner() -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    os._exit(0)


def main() -> None:
    threading.Thread(target=end_with_owner, daemon=True).start()
    told = json.loads(sys.argv[1])

    import torch
    from transformers import AutoModelForCausalLM

    from relax_core.families.hf_config import end_token_ids

    torch.set_num_threads(told["threads"])
    model = AutoModelForCausalLM.from_pretrained(told["model"], dtype=getattr(torch, told["dtype"])).eval()
    decoder = Decoder(model, version=told["version"], end_ids=end_token_ids(Path(told["model"])))
    token = Path(told["token_file"]).read_text().strip()
    answers = handler(decoder, token=token, context=told["context"], model=model)
    server = ThreadingHTTPServer((told["host"], 0), answers, bind_and_activate=False)
    server.socket.close()
    server.socket = socket.socket(fileno=told["listener"])
    server.daemon_threads = True
    decoder.start()
    port = server.socket.getsockname()[1]
    print(json.dumps({"url": f"http://{told['host']}:{port}", "pid": os.getpid(), "port": port}), flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
