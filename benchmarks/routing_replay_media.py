"""Measures routing replay on models that see: the log-prob gap to a bfloat16 engine, and the time of a train step.

`python -m benchmarks.routing_replay --media` prints it for a random model with the sizes of the builtin
tiny_qwen3_vl_moe with four language layers, whose prompts hold an image each; with ``--omni`` for one with those of
tiny_qwen3_omni, whose prompts hold an image, a video, a clip or a video with its sound in turn. Steps with and without
the engine's experts take turns, and their time is CPU seconds of one thread.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.decode_media import TEXT_TOKENS, requests_of, start
from benchmarks.parity_media import AUDIO_END, WORDS, around_item
from benchmarks.parity_omni import OMNI, OmniItems, make_omni_model
from benchmarks.routing_replay import REACH, Row, group_of, measure, table
from benchmarks.train_step_ways import Ours
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.media import Media
from relax_core.contracts.media_file import FolderReader
from relax_core.contracts.tree import TokenTree
from relax_core.engines.protocol.engine_client import EngineClient
from tests.seeing import EXPERTS, Seen, make_seeing_model

LAYERS, SAMPLES, NEW_TOKENS = 4, 8, 48
TURNS = 15  # of the step, each with and without replay
REACH_TIME = 1.01


@dataclass(frozen=True, kw_only=True)
class Model:
    """Names a model: as a builtin one, as a family, and in the table."""

    name: str
    builtin: str
    family: str


SEES = Model(name="random, sees", builtin=EXPERTS, family="qwen3_vl_moe")
OMNI_MODEL = Model(name="random, Omni", builtin="tiny_qwen3_omni", family=OMNI)


def seeing_prompts(folder: Path, *, prompts: int, seed: int) -> tuple[list[PromptRequest], list[int]]:
    """Makes the model that sees; returns prompts, and the tokens that are not sampled.

    These are those of media, and the end, so that all answers are long.
    """
    make_seeing_model(folder / "seeing", name=EXPERTS, seed=seed, layers=LAYERS)
    seen = Seen(folder / "seeing", folder / "media")
    tower = seen.tower
    banned = [3, tower.image_token_id, tower.video_token_id, tower.vision_start_token_id, tower.vision_end_token_id]
    return requests_of(seen, prompts=prompts, seed=seed), sorted(banned)


def omni_prompts(folder: Path, *, prompts: int, seed: int) -> tuple[list[PromptRequest], list[int]]:
    """Makes the Omni model; returns what `seeing_prompts` returns."""
    make_omni_model(folder / "seeing", seed=seed, size=0.15, num_hidden_layers=LAYERS, num_experts=8)
    items = OmniItems(folder / "seeing", folder / "media")
    kinds = (
        lambda: items.image(4, 6),
        lambda: items.video(3, 4, 4),
        lambda: items.clip(730),
        lambda: items.heard_video(3, 2, 4, frames=250),
    )
    random = np.random.default_rng(seed)
    requests = []
    for place in range(prompts):
        item = kinds[place % len(kinds)]()
        before, behind = around_item(item)
        words = random.integers(0, WORDS, (2, TEXT_TOKENS)).tolist()
        first = TEXT_TOKENS + len(before)
        ids = [*words[0], *before, *item.ids.tolist(), *behind, *words[1]]
        media = [Media(item, first, first + item.rows)]
        requests.append(
            PromptRequest(rid=f"{seed}-{place}", input_ids=ids, sampling_seed=10_000 * seed + place, media=media)
        )
    return requests, [3, *range(WORDS, AUDIO_END + 1)]


async def answers_of(
    client: EngineClient, requests: Sequence[PromptRequest], banned: Sequence[int]
) -> dict[str, list[Generated]]:
    """Returns the samples of each request, by its rid."""
    params = SamplingParams(
        n=SAMPLES, max_new_tokens=NEW_TOKENS, banned_token_ids=list(banned), return_routed_experts=True
    )
    found: dict[str, list[Generated]] = {}
    try:
        async for one in client.generate(requests, params):
            found.setdefault(requests[one.prompt].rid, []).append(one)
    finally:
        await client.aclose()
    return found


def sample_media(folder: Path, requests: Sequence[PromptRequest], banned: Sequence[int]) -> list[TokenTree]:
    """Returns groups that a bfloat16 engine sampled to prompts with items, with its log-probs and its experts."""
    process, client = start(folder, "seeing", media=True, dtype="bfloat16")
    try:
        found = asyncio.run(answers_of(client, requests, banned))
    finally:
        process.stop(timeout_s=5.0)
    groups = [group_of(place, one.input_ids, found[one.rid]) for place, one in enumerate(requests)]
    return [replace(group, media=list(one.media)) for group, one in zip(groups, requests, strict=True)]


def step_ratios(model_folder: Path, family: str, groups: Sequence[TokenTree], media: FolderReader) -> list[float]:
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
    ours = {way: Ours(model_folder, family=family, media=media) for way in ways}
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


def print_media_replay(*, omni: bool, seeds: int, prompts: int, json_file: Path | None) -> None:
    """Measures and prints the gaps of each seed and the ratio of the step times; writes all as JSON if asked to."""
    model, make = (OMNI_MODEL, omni_prompts) if omni else (SEES, seeing_prompts)
    rows: list[Row] = []
    ratios: list[float] = []
    for seed in range(seeds):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "token").write_text("token")
            requests, banned = make(folder, prompts=prompts, seed=seed)
            groups = sample_media(folder, requests, banned)
            media = FolderReader(folder / "media")
            rows.append(
                measure(model.name, seed, folder / "seeing", groups, model=model.builtin, media=media, banned=banned)
            )
            if not seed:
                ratios = step_ratios(folder / "seeing", model.family, groups, media)
    print(table(rows))
    print(
        f"step time with replay over without: {statistics.median(ratios):.3f} "
        f"({min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} turns); reach {REACH_TIME}"
    )
    if json_file is not None:
        gaps = [asdict(row) | {"fall": row.fall} for row in rows]
        json_file.write_text(json.dumps({"gaps": gaps, "reach": REACH, "step_ratios": ratios}, indent=1))
