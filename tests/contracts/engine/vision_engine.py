"""Shared parts of the contract's media tests: a running vision engine, prompts, and transformers' log-probs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import MediaItem
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import TokensToScore
from relax_core.engines.sglang.media.placed_items import placed_name
from relax_core.engines.sglang.sglang_client import BAN
from relax_core.families.folder import folder_architecture
from relax_core.tools.tiny_media import write_published
from relax_core.weights.folder_stream import read_safetensors
from relax_core.weights.version_file import write_weights
from tests.contracts.engine.harness import Engine
from tests.vision_models import EXPERTS, HYBRIDS, Seen, make_tiny_vision_model, text

TOLERANCE = 2e-5
CONTEXT = 2048
MAX_TOTAL_TOKENS = 16 * CONTEXT
WITH_EXPERTS = (EXPERTS, HYBRIDS[1])
PARAMS = SamplingParams(n=2, max_new_tokens=10, temperature=0.9)


@dataclass
class VisionEngine:
    """Holds a running vision engine, and transformers' model with the same weights."""

    engine: Engine
    model: Any
    seen: Seen
    name: str
    folder: Path

    def prompts(self, *parts: Sequence[Sequence[int] | MediaItem]) -> list[PromptRequest]:
        found = []
        for index, prompt_parts in enumerate(parts):
            ids, media = self.seen.prompt(*prompt_parts)
            found.append(PromptRequest(rid=f"prompt-{index}", input_ids=ids, sampling_seed=3 + index, media=media))
        return found

    @property
    def passes(self) -> int:
        """Returns the number of items that have passed the engine's tower."""
        return int(self.engine.client.loads()["tower_passes"])

    @property
    def has_experts(self) -> bool:
        """Returns whether the model is a mixture of experts."""
        return self.name in WITH_EXPERTS

    @property
    def state_tokens(self) -> int:
        """Returns the size of a sample's states in tokens: state bytes divided by a token's key and value bytes."""
        config = self.model.config.get_text_config()
        kinds = getattr(config, "layer_types", None) or ["full_attention"]
        linear, attention = kinds.count("linear_attention"), kinds.count("full_attention")
        if not linear:
            return 0
        heads, keys = config.linear_num_value_heads, config.linear_num_key_heads * config.linear_key_head_dim
        matrix = heads * config.linear_key_head_dim * config.linear_value_head_dim
        inputs = (config.linear_conv_kernel_dim - 1) * (2 * keys + heads * config.linear_value_head_dim)
        return -(-linear * (matrix + inputs) // (attention * 2 * config.num_key_value_heads * config.head_dim))

    @property
    def params(self) -> SamplingParams:
        """Returns sampling settings that ban media tokens and have no stop token."""
        tower = self.seen.tower
        special = [tower.image_token_id, tower.video_token_id, tower.vision_start_token_id, tower.vision_end_token_id]
        return msgspec.structs.replace(PARAMS, banned_token_ids=[*special, 3])

    def expected(self, prompt: PromptRequest, generated: Generated, params: SamplingParams) -> torch.Tensor:
        """Returns transformers' log-probs of the generated tokens."""
        output = self.seen.logits(self.model, prompt.input_ids + generated.output_ids.tolist(), prompt.media)
        logits = output.logits[0, len(prompt.input_ids) - 1 : -1]
        logits[:, params.banned_token_ids] = float("-inf")
        table = (logits / params.temperature).log_softmax(-1)
        return table.gather(-1, torch.tensor(generated.output_ids.tolist())[:, None])[:, 0]

    def gap(self, prompts: Sequence[PromptRequest], found: Sequence[Generated], params: SamplingParams) -> float:
        """Returns the largest difference from transformers' log-probs."""
        gaps = [
            self.expected(prompts[generated.prompt], generated, params) - torch.tensor(generated.logprobs)
            for generated in found
        ]
        return float(torch.cat(gaps).abs().max())

    def body(self, prompt: PromptRequest, rid: str, *, new: int = 1500) -> dict[str, Any]:
        """Returns the `long_body` of a prompt for this engine."""
        return long_body(prompt, self.params, rid, new=new, kind=self.engine.kind)

    def scores(self, prompts: Sequence[PromptRequest]) -> list[list[float]]:
        """Returns the log-probs of each prompt's tokens after the first token."""
        items = [TokensToScore(input_ids=prompt.input_ids, first=1, media=prompt.media) for prompt in prompts]
        return [scores.logprobs.tolist() for scores in self.engine.client.score(items, top_k=0, temperature=1.0)]

    def publish(self, path: Path, model: Any) -> None:
        """Serves the weights of ``model`` as the next version."""
        path.mkdir()
        write_published(model, path)
        version = self.engine.version + 1
        manifest = write_weights(path / "version.bin", version=version, tensors=read_safetensors(path))
        self.engine.client.update_weights(manifest)


def start(launch: EngineLaunch, folder: Path, *, name: str, kind: str) -> Iterator[VisionEngine]:
    model = make_tiny_vision_model(folder / "model", name=name)
    seen = Seen(folder / "model", folder / "media")
    process = EngineProcess.start(
        replace(
            launch,
            model_folder=folder / "model",
            media_folder=folder / "media",
            engine=replace(launch.engine, context_length=CONTEXT, max_total_tokens=MAX_TOTAL_TOKENS),
            return_routed_experts=name in WITH_EXPERTS,
        )
    )
    vocab_size = folder_architecture(folder / "model").vocab_size
    engine = Engine(process, kind, vocab_size=vocab_size, has_states=name in HYBRIDS)
    yield VisionEngine(engine, model, seen, name, folder)
    process.stop(timeout_s=5.0)


def scene(seeing: VisionEngine) -> list[PromptRequest]:
    """Returns prompts with images of several sizes, videos, both, and text only."""
    seen = seeing.seen
    return seeing.prompts(
        (text(5), seen.image(2, 2), text(4)),
        (text(1), seen.image(5, 3, seed=1), text(6)),
        (text(3), seen.video(3, 2, 2), text(2)),
        (text(12),),
        (seen.image(3, 3, seed=2), text(4), seen.image(3, 3, seed=3), text(1), seen.video(2, 2, 3, seed=4), text(7)),
    )


def long_body(
    prompt: PromptRequest, params: SamplingParams, rid: str, *, new: int = 1500, kind: str = "embedded"
) -> dict[str, Any]:
    """Returns a /generate body for one sample that ends only after ``new`` tokens, for a kind of engine."""
    sampling = {"max_new_tokens": new, "ignore_eos": True, "temperature": params.temperature, "sampling_seed": 1}
    body = {"rid": rid, "input_ids": prompt.input_ids, "return_logprob": True}
    if kind == "sglang":
        bans = {str(token): BAN for token in params.banned_token_ids}
        names = {"image_data": [placed_name(medium) for medium in prompt.media]} if prompt.media else {}
        return body | names | {"sampling_params": sampling | {"logit_bias": bans, "stream_interval": 1}}
    return body | {
        "media": [[(medium.item.digest, medium.start) for medium in prompt.media]],
        "sampling_params": sampling,
        "banned_token_ids": params.banned_token_ids,
    }


def take(event: dict[str, Any], tokens: list[int], logprobs: list[float]) -> dict[str, Any]:
    """Appends an event's tokens and log-probs. Returns the event's meta_info."""
    tokens += event["output_ids"]
    meta: dict[str, Any] = event["meta_info"]
    logprobs += [entry[0] for entry in meta["output_token_logprobs"]]
    return meta


def read(events: Iterator[dict[str, Any]], tokens: list[int], logprobs: list[float], *, count: int) -> None:
    """Reads events and appends their tokens and log-probs until there are ``count`` tokens."""
    while len(tokens) < count:
        take(next(events), tokens, logprobs)
