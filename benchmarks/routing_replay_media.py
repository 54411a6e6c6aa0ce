"""Measures routing replay on a model that sees: the log-prob gap to a bfloat16 engine, and the time of a train step.

`python -m benchmarks.routing_replay --media` prints it. The model is random: the sizes of the builtin
tiny_qwen3_vl_moe with four language layers. Each prompt holds an image. Steps with and without the engine's experts
take turns, and their time is CPU seconds of one thread.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np

from benchmarks.decode_media import requests_of, start
from benchmarks.routing_replay import REACH, Row, group_of, measure, table
from benchmarks.train_step_ways import Ours
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.engines.protocol.engine_client import EngineClient
from tests.seeing import EXPERTS, Seen, make_seeing_model

LAYERS, SAMPLES, NEW_TOKENS = 4, 8, 48
TURNS = 15  # of the step, each with and without replay
REACH_TIME = 1.01


def banned_of(seen: Seen) -> list[int]:
    """Returns the tokens that are not sampled, sorted: those of media, and the end, so that all answers are long."""
    tower = seen.tower
    return sorted(
        [3, tower.image_token_id, tower.video_token_id, tower.vision_start_token_id, tower.vision_end_token_id]
    )


async def answers_of(client: EngineClient, requests: Sequence[PromptRequest], seen: Seen) -> dict[str, list[Generated]]:
    """Returns the samples of each request, by its rid."""
    params = SamplingParams(
        n=SAMPLES, max_new_tokens=NEW_TOKENS, banned_token_ids=banned_of(seen), return_routed_experts=True
    )
    found: dict[str, list[Generated]] = {}
    try:
        async for one in client.generate(requests, params):
            found.setdefault(requests[one.prompt].rid, []).append(one)
    finally:
        await client.aclose()
    return found


def sample_media(folder: Path, seen: Seen, *, prompts: int, seed: int) -> list[TokenTree]:
    """Returns groups that a bfloat16 engine sampled to prompts with an image, with its log-probs and its experts."""
    requests = requests_of(seen, prompts=prompts, seed=seed)
    process, client = start(folder, "seeing", media=True, dtype="bfloat16")
    try:
        found = asyncio.run(answers_of(client, requests, seen))
    finally:
        process.stop(timeout_s=5.0)
    groups = [group_of(place, one.input_ids, found[one.rid]) for place, one in enumerate(requests)]
    return [replace(group, media=list(one.media)) for group, one in zip(groups, requests, strict=True)]


def step_ratios(model_folder: Path, groups: Sequence[TokenTree], media: FolderReader) -> list[float]:
    """Returns how many times as long a train step is with replay as without, one figure a turn."""
    random = np.random.default_rng(0)
    with_replay = []
    for group in groups:
        of_episodes = random.standard_normal(len(group.episodes)).astype(np.float32)
        with_replay.append(group.with_extras(advantages=of_episodes[group.tokens[0]]))
    own = [
        replace(group, extras={name: one for name, one in group.extras.items() if name != "routed_experts"})
        for group in with_replay
    ]
    ways = {"replay": with_replay, "own": own}
    ours = {way: Ours(model_folder, family="qwen3_vl_moe", media=media) for way in ways}
    ratios = []
    for turn in range(TURNS + 1):
        seconds = {}
        for way in list(ways) if turn % 2 else list(reversed(ways)):
            begin = time.process_time()
            ours[way].step(ways[way])
            seconds[way] = time.process_time() - begin
        if turn:  # The first turn warms up.
            ratios.append(seconds["replay"] / seconds["own"])
    return ratios


def print_media_replay(*, seeds: int, prompts: int, json_file: Path | None) -> None:
    """Measures and prints the gaps of each seed and the ratio of the step times; writes all as JSON if asked to."""
    rows: list[Row] = []
    ratios: list[float] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "token").write_text("token")
            make_seeing_model(folder / "seeing", name=EXPERTS, seed=seed, layers=LAYERS)
            seen = Seen(folder / "seeing", folder / "media")
            groups = sample_media(folder, seen, prompts=prompts, seed=seed)
            media = FolderReader(seen.folder)
            rows.append(
                measure(
                    "random, sees", seed, folder / "seeing", groups, model=EXPERTS, media=media, banned=banned_of(seen)
                )
            )
            if not seed:
                ratios = step_ratios(folder / "seeing", groups, media)
    print(table(rows))
    print(
        f"step time with replay over without: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} turns); reach {REACH_TIME}"
    )
    if json_file is not None:
        gaps = [asdict(row) | {"fall": row.fall} for row in rows]
        json_file.write_text(json.dumps({"gaps": gaps, "reach": REACH, "step_ratios": ratios}, indent=1))
