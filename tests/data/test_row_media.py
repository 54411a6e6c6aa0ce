"""Tests rows with images and videos in JSONL and Parquet: columns, placeholders, content parts and refusals."""

from __future__ import annotations

import base64
import dataclasses
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from relax_core.config.choices import MediaPlace
from relax_core.contracts.data import BadRow
from relax_core.contracts.env import media_sources
from relax_core.contracts.media import MediaError, MediaSource
from relax_core.data.data_files import RowFile, RowKeys, open_rows
from relax_core.data.row_media import MediaColumns, without_base64

PICTURE = b"\x89PNG" + bytes(range(256))
PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
URI = "data:image/png;base64," + base64.b64encode(PICTURE).decode()


def keys(root: Path, **changes: Any) -> RowKeys:
    columns = MediaColumns(columns={"image": "images", "video": "videos"}, root=root)
    return dataclasses.replace(RowKeys(prompt="prompt", answer="answer", media=columns), **changes)


def jsonl(folder: Path, *rows: dict[str, Any]) -> RowFile:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "red", **row}) + "\n" for row in rows), encoding="utf-8")
    return open_rows(file, keys(folder))


def test_sounds_come_from_columns_and_from_parts_of_every_form(tmp_path: Path) -> None:
    sound = b"RIFF\0\0\0\0WAVE"
    plain = base64.b64encode(sound).decode()
    parts = [
        {"type": "audio", "audio": "a.wav"},
        {"type": "input_audio", "input_audio": {"data": plain, "format": "wav"}},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{plain}"}},
        {"type": "audio_url", "audio_url": {"url": "https://example.org/a.wav"}},
        {"type": "audio"},
    ]
    columns = MediaColumns(columns={"image": "images", "audio": "sounds"}, root=tmp_path)
    file = tmp_path / "rows.jsonl"
    rows = [
        {"prompt": "a<audio>b<image>c<audio>", "images": "1.png", "sounds": ["2.wav", {"path": "3.mp3"}]},
        {"prompt": [{"role": "user", "content": parts}], "sounds": "last.flac"},
    ]
    file.write_text("".join(json.dumps({"answer": "low", **row}) + "\n" for row in rows), encoding="utf-8")
    found = [media_sources(row["prompt"]) for row in open_rows(file, keys(tmp_path, media=columns))]
    assert [(source.kind, Path(str(source.path)).name) for source in found[0]] == [
        ("audio", "2.wav"),
        ("image", "1.png"),
        ("audio", "3.mp3"),
    ]
    assert {source.kind for source in found[1]} == {"audio"}
    assert [source.data for source in found[1]] == [None, sound, sound, None, None]
    names = [None if source.path is None else Path(source.path).name for source in found[1]]
    assert names == ["a.wav", None, None, "a.wav", "last.flac"]
    assert found[1][3].path == "https://example.org/a.wav", "the URL is refused when the item is opened"


def image(path: Path) -> MediaSource:
    return MediaSource(kind="image", path=str(path))


def test_columns_fill_the_places_of_the_prompt_in_order(tmp_path: Path) -> None:
    rows = jsonl(
        tmp_path,
        {"prompt": "only text with a < and a <video"},
        {"prompt": "<image>What colour?", "images": ["a/17.png"]},
        {"prompt": "a<video>b<image>c<image>", "images": ["1.png", "/abs/2.png"], "videos": "3.mp4"},
        {"prompt": [{"role": "system", "content": "look"}, {"role": "user", "content": "<image>?"}], "images": URI},
        {
            "prompt": [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "?"}]}],
            "images": "x.png",
        },
    )
    assert rows[0]["prompt"] == "only text with a < and a <video"
    (message,) = rows[1]["prompt"]
    assert message == {
        "role": "user",
        "content": [{"type": "image", "image": image(tmp_path / "a/17.png")}, {"type": "text", "text": "What colour?"}],
    }
    assert [part["type"] for part in rows[2]["prompt"][0]["content"]] == [
        *("text", "video", "text", "image", "text", "image")
    ]
    assert media_sources(rows[2]["prompt"]) == [
        MediaSource(kind="video", path=str(tmp_path / "3.mp4")),
        image(tmp_path / "1.png"),
        image(Path("/abs/2.png")),
    ]
    assert rows[3]["prompt"][0] == {"role": "system", "content": "look"}
    assert media_sources(rows[3]["prompt"]) == [MediaSource(kind="image", data=PICTURE)]
    assert rows[3]["images"] == [MediaSource(kind="image", data=PICTURE)]  # the row no longer has base64 text
    assert media_sources(rows[4]["prompt"]) == [image(tmp_path / "x.png")]


@pytest.mark.parametrize(
    ("part", "wanted"),
    [
        ({"type": "image", "image": "a.png"}, ("image", "a.png")),
        ({"type": "image_url", "image_url": {"url": "a.png"}}, ("image", "a.png")),
        ({"type": "image_url", "image_url": "a.png"}, ("image", "a.png")),
        ({"type": "video", "video": {"bytes": None, "path": "b.mp4"}}, ("video", "b.mp4")),
        ({"type": "image", "url": "a.png"}, ("image", "a.png")),
        ({"type": "image", "path": "a.png", "image": None, "text": None}, ("image", "a.png")),
        ({"type": "video", "path": "b.mp4", "bytes": None}, ("video", "b.mp4")),
        ({"type": "audio", "url": "c.wav"}, ("audio", "c.wav")),
        ({"type": "video_url", "video_url": {"url": "b.mp4"}}, ("video", "b.mp4")),
    ],
)
def test_content_parts_have_openai_s_form(tmp_path: Path, part: dict[str, Any], wanted: tuple[str, str]) -> None:
    row = jsonl(tmp_path, {"prompt": [{"role": "user", "content": [part, {"type": "text", "text": "?"}]}]})[0]
    (source,) = media_sources(row["prompt"])
    assert (source.kind, source.path) == (wanted[0], str(tmp_path / wanted[1]))


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "base64": base64.b64encode(PNG).decode()},
        {"type": "image", "base64": "data:;base64," + base64.b64encode(PNG).decode()},
        {"type": "image", "image": base64.encodebytes(PNG).decode()},
        {"type": "image_url", "image_url": {"url": base64.b64encode(PNG).decode()}},
    ],
)
def test_a_content_part_has_base64_with_and_without_the_begin_of_a_uri(tmp_path: Path, part: dict[str, Any]) -> None:
    row = jsonl(tmp_path, {"prompt": [{"role": "user", "content": [part]}]})[0]
    assert media_sources(row["prompt"]) == [MediaSource(kind="image", data=PNG)]


def test_media_without_a_place_stand_before_the_first_user_message(tmp_path: Path) -> None:
    columns = MediaColumns(columns={"image": "images", "video": "videos"}, root=tmp_path, place=MediaPlace.first)
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "user", "content": "R"}]
    rows = [
        {"prompt": "Q", "images": ["1.png", "2.png"], "videos": "3.mp4"},
        {"prompt": chat, "images": "1.png"},
        {"prompt": "Q<image>", "images": "1.png", "videos": "3.mp4"},
        {"prompt": "Q"},
        {"prompt": "Q<image>", "images": ["1.png", "2.png"]},
        {"prompt": chat[:1], "images": "1.png"},
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps({"answer": "red", **row}) + "\n" for row in rows), encoding="utf-8")
    found = open_rows(file, keys(tmp_path, media=columns))
    types = [
        [part["type"] for part in found[number]["prompt"][at]["content"]] for number, at in ((0, 0), (1, 1), (2, 0))
    ]
    assert types == [["image", "image", "video", "text"], ["image", "text"], ["video", "text", "image"]]
    assert found[1]["prompt"][0]["content"] == "S" and found[3]["prompt"] == "Q"
    assert [Path(str(source.path)).name for source in media_sources(found[0]["prompt"])] == ["1.png", "2.png", "3.mp4"]
    with pytest.raises(MediaError, match="another number of items"):
        found[4]
    with pytest.raises(BadRow, match=r"data\.media_place=first needs"):
        found[5]


@pytest.mark.parametrize("value", ["A" * 200_000, "x.y" * 70_000, base64.b64encode(PNG * 999).decode()[1:]])
def test_no_error_shows_a_long_text_that_is_no_path(tmp_path: Path, value: str) -> None:
    for part in ({"type": "image", "image": value}, {"type": value}, {"type": "image", value: value}):
        with pytest.raises(BadRow) as told:
            jsonl(tmp_path, {"prompt": [{"role": "user", "content": [part]}]})[0]
        assert len(str(told.value)) < 500 + len(str(tmp_path))
    assert len(MediaSource(kind="image", path=value).description) < 500


@pytest.mark.parametrize(
    ("row", "reason", "message"),
    [
        ({"prompt": "<image><image>", "images": ["1.png"]}, "bad_media:placeholder_count", "has another number"),
        ({"prompt": "no place", "images": ["1.png"]}, "bad_media:placeholder_count", "data.media_keys.image"),
        ({"prompt": "<image>"}, "bad_media:placeholder_count", "the row has no column images, only answer, prompt"),
        ({"prompt": "<image>", "images": [5]}, "bad_media:unknown_format", "neither a path, bytes"),
        ({"prompt": "<image>", "images": "data:image/png;base64,???"}, "bad_media:unknown_format", "cannot be read"),
        ({"prompt": [{"role": "user", "content": [{"type": "file"}]}]}, "bad_row:prompt", "'file' is not read"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "?"}}]}]},
            "bad_media:unknown_format",
            "the base64 of its audio cannot be read",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": None}}]}]},
            "bad_media:unknown_format",
            "its audio is neither a path",
        ),
        ({"prompt": [{"role": "user", "content": [{"type": "text"}]}]}, "bad_row:prompt", "'text' is not read"),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "image_path": "a.png"}]}], "images": "b.png"},
            "bad_row:prompt",
            "has 'image_path'",
        ),
        (
            {"prompt": [{"role": "user", "content": [{"type": "image", "url": "a.png", "path": "b.png"}]}]},
            "bad_row:prompt",
            "has 'url', 'path'",
        ),
        ({"prompt": [{"role": "user", "content": []}]}, "bad_row:prompt", "neither text nor a list"),
    ],
)
def test_a_row_that_does_not_fit_is_bad_with_its_reason(
    tmp_path: Path, row: dict[str, Any], reason: str, message: str
) -> None:
    with pytest.raises(BadRow, match=message) as told:
        jsonl(tmp_path, row)[0]
    assert told.value.reason == reason and str(told.value).startswith(str(tmp_path / "rows.jsonl") + ", line 1: ")
    assert isinstance(told.value, MediaError) == reason.startswith("bad_media")


def test_urls_stay_what_they_are_so_that_they_are_refused_by_name(tmp_path: Path) -> None:
    row = jsonl(tmp_path, {"prompt": "<image><image>", "images": ["https://x/a.png", "file:///etc/passwd"]})[0]
    assert [source.path for source in media_sources(row["prompt"])] == ["https://x/a.png", "file:///etc/passwd"]


def test_no_error_shows_base64(tmp_path: Path) -> None:
    prompt = [{"role": "user", "content": {"url": URI * 3}}]
    with pytest.raises(BadRow) as told:
        jsonl(tmp_path, {"prompt": prompt})[0]
    assert URI[30:50] not in str(told.value)
    assert without_base64(f"a {URI} b") == "a data:… b"


def test_inline_media_of_a_jsonl_are_not_kept_in_memory(tmp_path: Path) -> None:
    big = "data:image/png;base64," + base64.b64encode(bytes(1 << 20)).decode()
    rows = [{"prompt": "<image>", "images": big} for _ in range(24)]
    file = jsonl(tmp_path, *rows)
    tracemalloc.start()
    file = open_rows(tmp_path / "rows.jsonl", keys(tmp_path))
    for number in range(len(file)):
        assert len(media_sources(file[number]["prompt"])[0].data or b"") == 1 << 20
    kept, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert kept < 4 << 20


def parquet(folder: Path, *, group: int, rows: int = 12) -> Path:
    file = folder / "rows.parquet"
    struct = [[{"bytes": PICTURE + bytes([number]) * 2000, "path": None}] for number in range(rows)]
    table = pyarrow.table(
        {
            "prompt": ["<image>?" if number % 3 else "text" for number in range(rows)],
            "answer": [str(number) for number in range(rows)],
            "images": [value if number % 3 else None for number, value in enumerate(struct)],
            "videos": pyarrow.array([None] * rows, pyarrow.string()),
        }
    )
    pyarrow.parquet.write_table(table, file, row_group_size=group, compression="none", use_dictionary=False)
    return file


def test_parquet_rows_have_bytes_in_structs_and_text_rows_among_them(tmp_path: Path) -> None:
    file = open_rows(parquet(tmp_path, group=4), keys(tmp_path))
    assert file[0]["prompt"] == "text" and file[0]["answer"] == "0"
    assert media_sources(file[7]["prompt"]) == [MediaSource(kind="image", data=PICTURE + bytes([7]) * 2000)]
    with pytest.raises(
        ValueError, match=r"data.media_keys.image=pictures: .* has no such column; it has answer, images"
    ):
        open_rows(tmp_path / "rows.parquet", keys(tmp_path, media=MediaColumns(columns={"image": "pictures"})))


def test_large_row_groups_are_refused_with_the_command_that_rewrites_the_file(tmp_path: Path) -> None:
    file = parquet(tmp_path, group=12)
    small = keys(tmp_path, row_group_bytes=12_000)
    with pytest.raises(ValueError, match=r"MB, more than the 0.012.* python -c ") as told:
        open_rows(file, small)
    command = str(told.value).partition("python -c ")[2]
    subprocess.run(f"{sys.executable} -c {command}", shell=True, check=True, timeout=120)
    again, whole = open_rows(tmp_path / "rows.small.parquet", small), open_rows(file, keys(tmp_path))
    assert [again[number] for number in range(len(again))] == [whole[number] for number in range(len(whole))]
    text = dataclasses.replace(small, media=MediaColumns())
    assert len(open_rows(file, text)) == 12  # text-only data is read without media
