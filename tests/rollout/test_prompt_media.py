"""Tests prompts with images, starting at the data row: bad media in the ledger, and an env that returns an image."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from relax_core.config.choices import Overlong
from relax_core.contracts.data import BadRow
from relax_core.contracts.engine import EngineError, PromptRequest
from relax_core.contracts.media import Media, MediaError, MediaItem, MediaSource
from relax_core.contracts.reward import RewardInput
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.registry import find_env
from relax_core.rollout.episodes.episode_records import one_turn_episodes, without_bytes
from relax_core.rollout.item_cache import ItemCache
from relax_core.rollout.prompt_tokens import PromptMaker, check_prompt_tokens, shown_prompt
from relax_core.rollout.rollout_loop import BadRows
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.media_items import IMAGE, image_item
from tests.responses import response

WHERE = "rows.jsonl, line 3"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PromptTokenizer:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made, vision=True)
    return PromptTokenizer(made)


class Encoder:
    """Returns an item of 2 × 3 rows for each path. Refuses the path "missing"."""

    def __init__(self, tokenizer: PromptTokenizer, folder: Path | None = None) -> None:
        self._token, self._folder = tokenizer.media_ids["image"], folder

    async def encode(self, source: MediaSource) -> MediaItem:
        if source.path == "missing":
            raise MediaError("image", "missing_file", "missing: no such file.")
        made = image_item(2, 3, seed=len(source.description), folder=self._folder)
        ids = np.where(made.ids == IMAGE, self._token, made.ids).astype("<i4").tobytes()
        return msgspec.structs.replace(made, token_ids=ids, placeholder=[self._token])


def maker(tokenizer: PromptTokenizer, *, room: int = 200, how: Overlong = Overlong.drop, **given: Any) -> PromptMaker:
    env = find_env("single_turn")
    items = given.pop("items", ItemCache(Encoder(tokenizer), max_bytes=0))
    return PromptMaker(
        env=env,
        env_config=env.config(name=env.name),
        tokenizer=tokenizer,
        max_prompt_tokens=room,
        overlong=how,
        items=items,
        prompt_items=2,
        **given,
    )


def row(*paths: str, text: str = "which?") -> dict[str, Any]:
    parts = [{"type": "image", "image": MediaSource(kind="image", path=path)} for path in paths]
    return {"prompt": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], "answer": "red"}


def made(prompts: PromptMaker, data_row: dict[str, Any]) -> Any:
    return asyncio.run(prompts.prompt(data_row, where=WHERE, owner="g"))


def test_a_prompt_has_its_items_rows_and_where_they_are(tokenizer: PromptTokenizer) -> None:
    prompt = made(maker(tokenizer), row("a", "bb"))
    assert [medium.end - medium.start for medium in prompt.media] == [6, 6]
    for medium in prompt.media:
        assert prompt.token_ids[medium.start : medium.end] == medium.item.ids.tolist()
    assert shown_prompt(row("a", "bb")["prompt"], prompt.items) == "[image 24×16][image 24×16]which?"
    text = made(maker(tokenizer, items=None), {"prompt": "which?", "answer": "red"})
    assert text.media == [] and text.token_ids == tokenizer.encode([{"role": "user", "content": "which?"}])


@pytest.mark.parametrize(
    ("data_row", "room", "reason", "message"),
    [
        (row("missing"), 200, "bad_media:missing_file", "missing: no such file"),
        (row("a", "b", "c"), 200, "bad_media:too_many_items", "3 items of media, and a prompt has at most 2"),
        (row("a", "b"), 20, "bad_media:too_many_tokens", "Its media take 12 of them"),
    ],
)
def test_a_row_whose_media_cannot_be_used_is_told_with_its_line(
    tokenizer: PromptTokenizer, data_row: dict[str, Any], room: int, reason: str, message: str
) -> None:
    with pytest.raises(MediaError, match=message) as told:
        made(maker(tokenizer, room=room), data_row)
    assert told.value.reason == reason and str(told.value).startswith(f"{WHERE}: ")


@pytest.mark.parametrize("text", ["<image>which?", "which?\n<image>"])
def test_a_place_without_an_item_is_a_bad_row(tokenizer: PromptTokenizer, text: str) -> None:
    for data_row in ({"prompt": text, "answer": "red"}, {"prompt": [{"role": "user", "content": text}], "answer": ""}):
        sees = maker(tokenizer, media_kinds=("image",), item_rows=lambda source: 6)
        for call in (lambda: made(sees, data_row), lambda: sees.bound(data_row, where=WHERE)):  # noqa: B023
            with pytest.raises(MediaError, match=r"data\.media_keys\.image") as told:
                call()
            assert told.value.reason == "bad_media:placeholder_count" and str(told.value).startswith(f"{WHERE}: ")
        assert made(maker(tokenizer, media_kinds=("audio",)), data_row).media == []
    seen = maker(tokenizer, media_kinds=("image",))
    assert made(seen, row("a", text="<image> is a place")).items and not made(seen, row(text="a <image> tag")).items


def test_a_sound_for_a_model_that_only_sees_is_a_bad_row(tokenizer: PromptTokenizer) -> None:
    part = {"type": "audio", "audio": MediaSource(kind="audio", path="a.wav")}
    heard = {"prompt": [{"role": "user", "content": [part]}], "answer": "low"}
    planned = maker(tokenizer, items=None, item_rows=lambda source: 6)
    for call in (lambda: made(maker(tokenizer), heard), lambda: planned.tokens(heard, where=WHERE)):
        with pytest.raises(BadRow, match="it has media of kind audio, but the model reads image, video only") as told:
            call()
        assert told.value.reason == "bad_row:prompt" and str(told.value).startswith(f"{WHERE}: ")
        assert "Use a model that hears, e.g. model=qwen3_omni, with modality=auto; or leave such rows" in str(
            told.value
        )


def test_a_run_on_text_refuses_a_row_with_an_image_and_a_plan_counts_its_rows(tokenizer: PromptTokenizer) -> None:
    for call in (
        lambda prompt_maker: made(prompt_maker, row("a")),
        lambda prompt_maker: prompt_maker.tokens(row("a"), where=WHERE),
    ):
        with pytest.raises(BadRow, match="it has media of kind image, but only text is read") as told:
            call(maker(tokenizer, items=None))
        assert told.value.reason == "bad_row:prompt"
        assert "Use a model that sees, e.g. model=qwen3_vl, with modality=auto; or leave such rows" in str(told.value)
    planned = maker(tokenizer, items=None, item_rows=lambda source: 6)
    assert len(planned.tokens(row("a"), where=WHERE)) == len(made(maker(tokenizer), row("a")).token_ids)


def test_only_text_is_shortened(tokenizer: PromptTokenizer) -> None:
    long = row("a", text="0123456789" * 10)
    prompt = made(maker(tokenizer, room=60, how=Overlong.truncate_left), long)
    assert len(prompt.token_ids) == 60 and len(prompt.media) == 1 and "789" in tokenizer.decode(prompt.token_ids)


def test_too_many_bad_media_in_a_row_end_the_run_with_the_first_file_and_one_good_row_starts_anew() -> None:
    bad = BadRows(rows=1000, most=1.0, report=lambda rows: None, most_in_a_row=3)
    for number in range(100):
        bad.draw(number)
        if number % 3 == 2:
            bad.use()
        else:
            bad.leave_out(number, MediaError("image", "missing_file", f"{number}.png is not there."))
    assert bad.media_reasons == {"missing_file": 67}
    bad.leave_out(100, BadRow.because("prompt", "no media"))  # this reason is not about media
    bad.leave_out(101, MediaError("image", "truncated", "101.png is cut."))
    with pytest.raises(ValueError, match=r"3 data rows in a row cannot be used.* The first: 99.png"):
        bad.leave_out(102, MediaError("image", "truncated", "102.png is cut."))


def test_an_answer_to_a_prompt_of_another_length_is_refused_with_both_numbers(tokenizer: PromptTokenizer) -> None:
    prompt = made(maker(tokenizer), row("a"))
    sent = PromptRequest(rid="g-0", input_ids=prompt.token_ids, sampling_seed=0, media=prompt.media)
    text = PromptRequest(rid="g-1", input_ids=[1, 2], sampling_seed=0)
    count = len(prompt.token_ids)

    def answer(seen: int) -> Any:
        return msgspec.structs.replace(response([1], versions=0), prompt_tokens=seen)

    check_prompt_tokens(sent, [answer(count)])
    check_prompt_tokens(text, [answer(0), answer(2)])  # for text, an engine may omit the count
    for request, seen in ((sent, count + 1), (sent, 0), (text, 3)):
        with pytest.raises(EngineError, match=f"prompt of {seen} tokens, and {len(request.input_ids)} were sent"):
            check_prompt_tokens(request, [answer(seen)])


def test_a_reward_gets_pixels_by_the_items_file_and_no_bytes(tokenizer: PromptTokenizer, tmp_path: Path) -> None:
    item = image_item(2, 3, folder=tmp_path)
    inline = {
        "prompt": [
            {"role": "user", "content": [{"type": "image", "image": MediaSource(kind="image", data=b"x" * 9999)}]}
        ]
    }
    request = PromptRequest(rid="r", input_ids=[1], sampling_seed=0, media=[Media(start=0, end=1, item=item)])
    (episode,) = one_turn_episodes("g0", request, [response([1], versions=0)], tokenizer=tokenizer)
    given = episode.reward_input({**inline, "answer": "red"}, "row 1", media_folder=str(tmp_path))
    sent = msgspec.msgpack.encode([given])  # the form that a worker process receives
    (come,) = msgspec.msgpack.decode(sent, type=list[RewardInput])
    pixels = come.frames(0)
    assert pixels.shape == (1, 16, 24, 3) and pixels.dtype == np.uint8 and not pixels.flags.writeable
    assert b"xxx" not in sent and json.dumps(without_bytes(inline)).count("9999 bytes of image") == 1
