"""Tests prompts with images and videos: user text stays text, placeholders become rows, later turns have images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relax_core.contracts.media import Media, MediaItem, MediaSource
from relax_core.data.tokenizer import PromptTokenizer
from relax_core.data.turn_tokens import TurnTokens
from relax_core.tools.tiny_text import write_tiny_tokenizer
from tests.media_items import image_item, video_item

SPECIALS = (
    *("<pad>", "<unk>", "<|im_start|>", "<|im_end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(made, vision=True)
    return made


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> PromptTokenizer:
    return PromptTokenizer(folder)


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def shown(kind: str) -> dict[str, Any]:
    return {"type": kind, kind: MediaSource(kind="image" if kind == "image" else "video", path="x")}


def own_item(tokenizer: PromptTokenizer, kind: str, seed: int = 0) -> MediaItem:
    """Returns an item with the ids of this tokenizer."""
    import msgspec
    import numpy as np

    made = image_item(2, 2, seed=seed) if kind == "image" else video_item([[9], [8, 7]], 1, 2, seed=seed)
    core = tokenizer._tokenizer
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    own = dict(zip((90, 91, 92, 93), (core.token_to_id(name) for name in names), strict=True))
    ids = np.array([own.get(token_id, token_id) for token_id in made.ids.tolist()], dtype="<i4").tobytes()
    return msgspec.structs.replace(made, token_ids=ids, placeholder=[own[token_id] for token_id in made.placeholder])


@pytest.mark.parametrize("special", SPECIALS)
def test_the_name_of_a_special_token_in_a_user_s_text_stays_text(
    folder: Path, tokenizer: PromptTokenizer, special: str
) -> None:
    core = tokenizer._tokenizer
    token = core.token_to_id(special)
    assert token is not None
    plain, marked = (tokenizer.encode([{"role": "user", "content": f"a{name}b"}]) for name in ("", special))
    assert marked.count(token) == plain.count(token)  # the template may write the token itself
    assert tokenizer.decode(marked) == tokenizer.decode(plain).replace("ab", f"a{special}b")
    # Each character is one token in this tokenizer.
    assert len(marked) == len(plain) + len(special)
    # Now the same text next to an image, and in a later turn.
    parts = tokenizer.encode(user(shown("image"), text(f"a{special}b")))
    without = tokenizer.encode(user(shown("image"), text("ab")))
    assert len(parts) == len(without) + len(special) and parts.count(token) == without.count(token)
    item = own_item(tokenizer, "image")
    ids, (placed,) = tokenizer.place_items(parts, [item])
    assert ids[placed.start : placed.end] == item.ids.tolist() and len(ids) == len(parts) - 1 + item.rows


def test_text_without_names_of_special_tokens_has_the_ids_of_transformers(folder: Path) -> None:
    from transformers import AutoTokenizer

    messages = [{"role": "system", "content": "be brief"}, *user(shown("image"), text("which <colour>?"))]
    bare = [messages[0], {"role": "user", "content": [{"type": "image"}, text("which <colour>?")]}]
    ids = AutoTokenizer.from_pretrained(folder).apply_chat_template(bare, add_generation_prompt=True, return_dict=False)
    assert PromptTokenizer(folder).encode(messages) == ids


def test_items_stand_for_their_placeholders_in_order(tokenizer: PromptTokenizer) -> None:
    picture, video = own_item(tokenizer, "image"), own_item(tokenizer, "video")
    messages = user(text("a"), shown("image"), text("b"), shown("video"), shown("image"), text("c"))
    ids, media = tokenizer.place_items(tokenizer.encode(messages), [picture, video, picture])
    assert [medium.item for medium in media] == [picture, video, picture]
    for medium in media:
        assert ids[medium.start : medium.end] == medium.item.ids.tolist()
    rest = [token for place, token in enumerate(ids) if not any(medium.start <= place < medium.end for medium in media)]
    words = tokenizer.decode(rest)  # only the template's marks around an item remain
    assert words.count("<|vision_start|>") == 3 and "<|image_pad|>" not in words and "<|video_pad|>" not in words


@pytest.mark.parametrize("items", [[], ["image"], ["video", "image"], ["image", "image", "video"]])
def test_another_number_or_order_of_items_than_placeholders_is_refused(
    tokenizer: PromptTokenizer, items: list[str]
) -> None:
    ids = tokenizer.encode(user(shown("image"), shown("video"), text("?")))
    with pytest.raises(ValueError, match="the chat template shows image, video, but the conversation has"):
        tokenizer.place_items(ids, [own_item(tokenizer, kind) for kind in items])


def test_a_later_turn_shows_a_picture_and_its_text_is_plain(tokenizer: PromptTokenizer) -> None:
    opening = user(text("look"))
    item = own_item(tokenizer, "image")
    first = tokenizer.encode(opening)
    end = tokenizer.stop_token_ids[0]
    sampled = [*tokenizer.encode_text("more"), end]
    answer = user(text("here:"), shown("image"), text("<|image_pad|>?"))
    turns = TurnTokens(tokenizer, opening)
    ids, media = turns.next_prompt(first, sampled, answer, [item])
    whole = tokenizer.encode([*opening, {"role": "assistant", "content": "more"}, *answer])
    wanted, (place,) = tokenizer.place_items(whole, [item])
    assert ids == wanted and media == [Media(item, place.start, place.end)]
    again, more = turns.next_prompt(ids, sampled, user(shown("image")), [item])
    assert (
        again[: len(ids)] == ids and more[0].start > len(ids) and again[more[0].start :][: item.rows] == list(item.ids)
    )
    with pytest.raises(ValueError, match="the chat template shows image, but the conversation has none"):
        turns.next_prompt(first, sampled, answer, [])
