"""Measures the decode speed of picture prompts: over the text model of the same sizes, and over transformers' generate.

`python -m benchmarks.decode --media` prints it. The model is the builtin tiny_qwen3_vl with random weights, and the
text model has the sizes of its language model. Prompts have equally many rows; every round has new pictures, so that
each passes the tower. All take turns in every round, so that a loaded machine slows all.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from benchmarks.tiny_model import engine_config
from relax_core.contracts.engine import PromptRequest, SamplingParams
from relax_core.contracts.media_file import FolderReader
from relax_core.engines.engine_process import EngineLaunch, EngineProcess
from relax_core.engines.protocol.engine_client import EngineClient
from relax_core.engines.protocol.frames import StreamEnd
from relax_core.families.tiny_configs import VISION, tiny_config
from relax_core.families.vision.patches import patches_of
from tests.seeing import Seen, make_seeing_model, text

ROWS = (4, 4)  # of an image, in height and width
TEXT_TOKENS = 8
REACH_TEXT, REACH_TRANSFORMERS = 0.9, 2.0


def make_text_model(folder: Path) -> None:
    """Makes a Qwen3 with the sizes of the vision model's language model, and saves it."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    given = tiny_config(VISION)["text_config"]
    others = ("rope_scaling", "rope_theta", "model_type", "hidden_act", "dtype", "eos_token_id")
    sizes = {name: value for name, value in given.items() if name not in others}
    torch.manual_seed(0)
    config = Qwen3Config(**sizes, tie_word_embeddings=True, eos_token_id=3)
    Qwen3ForCausalLM(config).float().eval().save_pretrained(folder)


def start(folder: Path, model: str, *, media: bool, dtype: str = "float32") -> tuple[EngineProcess, EngineClient]:
    process = EngineProcess.start(
        EngineLaunch(
            model_folder=folder / model,
            engine=replace(engine_config(), context_length=512),
            dtype=dtype,
            token_file=folder / "token",
            log_file=folder / f"{model}.log",
            load_weights=True,
            media_folder=folder / "media" if media else None,
        )
    )
    return process, EngineClient(process.url, "token", request_timeout_s=120.0, control_timeout_s=30.0)


def requests_of(seen: Seen, *, prompts: int, seed: int) -> list[PromptRequest]:
    found = []
    for index in range(prompts):
        image = seen.image(*ROWS, seed=1000 * seed + index)
        ids, media = seen.prompt(text(TEXT_TOKENS, seed=seed), image, text(TEXT_TOKENS, seed=index))
        found.append(PromptRequest(rid=f"{seed}-{index}", input_ids=ids, sampling_seed=seed + index, media=media))
    return found


def as_text(requests: Sequence[PromptRequest]) -> list[PromptRequest]:
    return [
        PromptRequest(rid=one.rid, input_ids=text(len(one.input_ids), seed=index), sampling_seed=one.sampling_seed)
        for index, one in enumerate(requests)
    ]


async def one_turn(client: EngineClient, requests: Sequence[PromptRequest], params: SamplingParams) -> dict[str, float]:
    """Returns tokens a second of the whole call, and of its decoding alone by the engine's own clock."""
    ends: list[StreamEnd] = []
    start = time.perf_counter()
    tokens = sum([len(one.output_ids) async for one in client.generate(requests, params, on_end=ends.append)])
    wall = time.perf_counter() - start
    assert tokens == len(requests) * params.n * params.max_new_tokens
    return {"whole": tokens / wall, "decode": tokens / (ends[0].decode_ms / 1e3), "prefill_ms": ends[0].prefill_ms}


async def over_text(folder: Path, seen: Seen, *, new_tokens: int, rounds: int) -> Mapping[str, list[float]]:
    """Returns the ratios of 64 picture samples, 8 groups of 8, to text samples of as many rows.

    Each prompt is asked for twice, and the passes of the tower are counted an item.
    """
    picture, picture_client = start(folder, "seeing", media=True)
    words, words_client = start(folder, "text", media=False)
    ratios: dict[str, list[float]] = {"decode": [], "whole": [], "prefill_ms": [], "passes": []}
    tower = seen.tower
    banned = [tower.image_token_id, tower.video_token_id, tower.vision_start_token_id, tower.vision_end_token_id, 3]
    params = SamplingParams(n=8, max_new_tokens=new_tokens, banned_token_ids=banned)
    try:
        for number in range(rounds + 1):
            requests = requests_of(seen, prompts=8, seed=number)
            mine = await one_turn(picture_client, requests, params)
            other = await one_turn(words_client, as_text(requests), params)
            if number:
                ratios["decode"].append(mine["decode"] / other["decode"])
                ratios["whole"].append(mine["whole"] / other["whole"])
                ratios["prefill_ms"].append(mine["prefill_ms"] - other["prefill_ms"])
            again = [msgspec.structs.replace(one, rid=f"again-{one.rid}") for one in requests]
            await one_turn(picture_client, again, params)
        passes = int(picture_client.loads()["tower_passes"])
        ratios["passes"].append(passes / (8 * (rounds + 1)))
    finally:
        for client in (picture_client, words_client):
            await client.aclose()
        for process in (picture, words):
            process.stop(timeout_s=5.0)
    return ratios


async def over_transformers(
    folder: Path, seen: Seen, model: Any, *, new_tokens: int, rounds: int
) -> Mapping[str, list[float]]:
    """Returns the ratios of 16 picture prompts of one sample to transformers' generate in this process."""
    process, client = start(folder, "seeing", media=True)
    ratios: list[float] = []
    banned = [seen.tower.image_token_id, seen.tower.video_token_id, 3]
    params = SamplingParams(max_new_tokens=new_tokens, banned_token_ids=banned)
    reader = FolderReader(seen.folder)
    try:
        for number in range(rounds + 1):
            requests = requests_of(seen, prompts=16, seed=100 + number)
            mine = (await one_turn(client, requests, params))["whole"]
            start_s = time.perf_counter()
            ids = torch.tensor([one.input_ids for one in requests])
            items = [one.media[0].item for one in requests]
            with torch.inference_mode():
                out = model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    pixel_values=torch.cat([patches_of(reader.tensors(one)["frames"], seen.tower) for one in items]),
                    image_grid_thw=torch.tensor([one.grid for one in items]),
                    mm_token_type_ids=(ids == seen.tower.image_token_id).long(),
                    max_new_tokens=new_tokens,
                    min_new_tokens=new_tokens,
                    suppress_tokens=banned,
                    do_sample=True,
                    temperature=1.0,
                    top_k=0,
                    top_p=1.0,
                    pad_token_id=0,
                )
            other = out[:, ids.shape[1] :].numel() / (time.perf_counter() - start_s)
            if number:
                ratios.append(mine / other)
    finally:
        await client.aclose()
        process.stop(timeout_s=5.0)
    return {"whole": ratios}


def print_media_speeds(*, new_tokens: int, rounds: int) -> None:
    """Measures and prints both ratios, and writes them as JSON in the last line."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "token").write_text("token")
        model = make_seeing_model(folder / "seeing")
        make_text_model(folder / "text")
        seen = Seen(folder / "seeing", folder / "media")
        by_text = asyncio.run(over_text(folder, seen, new_tokens=new_tokens, rounds=rounds))
        by_transformers = asyncio.run(over_transformers(folder, seen, model, new_tokens=new_tokens, rounds=rounds))
    found = {
        f"64 picture samples over text, decode (reach {REACH_TEXT})": by_text["decode"],
        "64 picture samples over text, whole call": by_text["whole"],
        "64 picture samples: prefill and tower beyond text, ms": by_text["prefill_ms"],
        "64 picture samples: tower passes an item, each asked for twice (reach 1)": by_text["passes"],
        f"16 picture samples over transformers' generate (reach {REACH_TRANSFORMERS})": by_transformers["whole"],
    }
    for words, values in found.items():
        print(f"{words:<72} {statistics.median(values):>8.2f} ({min(values):.2f} to {max(values):.2f})")
    print(json.dumps({words: statistics.median(values) for words, values in found.items()}))
