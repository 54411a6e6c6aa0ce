"""Tests images as tool results: the results of the env, and the trees of episodes with the image of each turn."""

from __future__ import annotations

import asyncio
import dataclasses
import io
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

pytest.importorskip("PIL", reason="pip install 'relax-core[omni]'")

from PIL import Image

from envs.picture_tools import PictureTools, PictureToolsConfig
from relax_core.contracts.engine import Generated, PromptRequest, SamplingParams
from relax_core.contracts.env import Action, EpisodeStart, media_sources
from relax_core.contracts.media import MediaItem, MediaSource
from relax_core.contracts.reward import RewardOutput
from relax_core.contracts.tool_calls import ToolCall
from relax_core.contracts.tree import check_tree
from relax_core.data.media.item_encoder import encode_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.episodes.episode_player import EpisodePlayer
from relax_core.rollout.episodes.group_assembly import build_tree
from relax_core.rollout.item_cache import ItemCache
from relax_core.rollout.prompt_tokens import PromptMaker
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.media_items import TOWER
from tests.responses import admitted, response

# Two colours: the left half of the picture is red, the right half blue.
PIXELS = np.zeros((16, 32, 3), np.uint8)
PIXELS[:, :16, 0] = PIXELS[:, 16:, 2] = 255


def row() -> dict[str, Any]:
    written = io.BytesIO()
    Image.fromarray(PIXELS).save(written, format="PNG")
    parts = [{"type": "image", "image": MediaSource(kind="image", data=written.getvalue())}]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": "which?"}]}], "answer": "red"}


def call(name: str, **arguments: Any) -> Action:
    return Action(text="", stopped=True, tool_calls=(ToolCall(name=name, arguments=arguments),))


def pixels_of(observation: Any) -> np.ndarray:
    (source,) = media_sources(observation)
    return np.asarray(Image.open(io.BytesIO(source.data or b"")))


def test_tools_follow_each_other_and_mistakes_are_words() -> None:
    start = EpisodeStart(row=row(), group_seed=0, episode_seed=0)
    env = PictureTools(start, PictureToolsConfig())
    assert env.reset() == row()["prompt"]
    part = pixels_of(env.step(call("crop", left=8, top=0, right=24, bottom=16)).observation)
    assert np.array_equal(part, PIXELS[:, 8:24])
    turned = pixels_of(env.step(call("rotate", degrees=90)).observation)
    assert np.array_equal(turned, np.rot90(PIXELS[:, 8:24], k=-1)), "the newest picture is rotated clockwise"
    for mistake, words in (
        (call("crop", left=8, top=0, right=64, bottom=16), "not inside of the picture of 16 x 16 pixels"),
        (call("crop", left=0, top=0, right=2, bottom=16), "at least 8 x 8 pixels"),
        (call("rotate", degrees=45), "not by 45"),
        (call("rotate", angle=90), "Wrong arguments"),
        (call("zoom"), "no tool 'zoom'"),
    ):
        (message,) = env.step(mistake).observation
        assert message["role"] == "tool" and words in message["content"]
    done = env.step(Action(text="it is <answer> Red </answer>", content="it is <answer> Red </answer>", stopped=True))
    assert (done.done, done.reward, done.info) == (True, 1.0, {"failed_tool_calls": 5})
    blind = PictureTools(dataclasses.replace(start, row={"prompt": "which?", "answer": "red"}), PictureToolsConfig())
    (message,) = blind.step(call("rotate", degrees=90)).observation
    assert message["content"] == "There is no picture here."
    assert env.step(Action(text="blue", content="blue", stopped=True)).reward == 0.0


class Encoder:
    """Encodes in this process, without an encode worker."""

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tower = dataclasses.replace(TOWER, image_token_id=tokenizer.media_ids["image"], min_pixels=64)

    async def encode(self, source: MediaSource) -> MediaItem:
        item, _ = encode_item(source, self._tower, MediaLimits(), root=Path(), tokenize=lambda text: [])
        return item


class Scripted:
    """Replaces a policy that knows the tools: answers each turn with the next of these texts."""

    def __init__(self, tokenizer: PromptTokenizer, texts: Sequence[str]) -> None:
        self._ids = [[*tokenizer.encode_plain(text), tokenizer.stop_token_ids[0]] for text in texts]
        self.requests: list[PromptRequest] = []

    async def generate(
        self, prompts: Sequence[PromptRequest], sampling: SamplingParams, *, places: Sequence[int]
    ) -> AsyncIterator[tuple[int, list[Generated]]]:
        for number, prompt in enumerate(prompts):
            self.requests.append(prompt)
            turn = int(prompt.rid.rpartition(".")[2])
            made = response(self._ids[turn], versions=0, rid=prompt.rid, prompt=number, engine="engine-0")
            yield number, [msgspec.structs.replace(made, prompt_tokens=len(prompt.input_ids))]


CROP = "".join(
    f"<parameter={name}>\n{value}\n</parameter>\n"
    for name, value in {"left": 0, "top": 0, "right": 16, "bottom": 16}.items()
)
CALLS = (
    f"<tool_call>\n<function=crop>\n{CROP}</function>\n</tool_call>",
    "<tool_call>\n<function=rotate>\n<parameter=degrees>\n180\n</parameter>\n</function>\n</tool_call>",
    "<answer>red</answer>",
)


def test_the_pictures_of_tools_are_in_the_prompts_and_in_the_tree_once(tmp_path: Path) -> None:
    write_tiny_tokenizer(tmp_path, vision=True)
    tokenizer, spec = PromptTokenizer(tmp_path), find_env("picture_tools")
    config = PictureToolsConfig(tools_as="text", tool_parser="qwen3_coder")
    pool: Any = Scripted(tokenizer, CALLS)
    prompts = PromptMaker(
        env=spec,
        env_config=config,
        tokenizer=tokenizer,
        max_prompt_tokens=3000,
        items=ItemCache(Encoder(tokenizer), max_bytes=0),
        prompt_items=4,
    )
    sampling = SamplingParams(n=2, max_new_tokens=1000, stop_token_ids=tokenizer.stop_token_ids)

    async def play() -> Any:
        player = EpisodePlayer(env=spec, env_config=config, prompts=prompts, pool=pool, sampling=sampling, seed=0)
        start = admitted(0, row(), rid="g0")
        async with asyncio.TaskGroup() as tasks:
            return await player.play(start, tasks)

    records = asyncio.run(asyncio.wait_for(play(), 60.0))
    assert [(record.ended, len(record.turns), record.tool_calls) for record in records] == [("env_done", 3, 2)] * 2
    for record in records:
        assert [turn.tools for turn in record.turns] == [["crop"], ["rotate"], []]
        assert record.turns[-1].reward == 1.0
    last = next(request for request in pool.requests if request.rid.endswith(".2"))
    assert [medium.item.description for medium in last.media] == ["[image 32×16]", "[image 16×16]", "[image 16×16]"]
    for medium in last.media:
        assert last.input_ids[medium.start : medium.end] == medium.item.ids.tolist()
    for record, reward in zip(records, (1.0, 0.0), strict=True):
        record.output = RewardOutput(reward=reward)
    tree = build_tree("g0", records)
    check_tree(tree)
    # The tree contains the row's image once, and each tool's image once per episode.
    assert [medium.item.description for medium in tree.media].count("[image 32×16]") == 1 and len(
        tree.media
    ) == 1 + 2 * 2
    for medium in tree.media:
        assert not tree.loss_mask[medium.start : medium.end].any()
    text = tokenizer.decode(last.input_ids)
    assert "<tool_response>" in text and text.count("<|vision_start|>") == 3
