"""Tests images, audio and video of a sample, from a run's encoders to the page. The server serves no other files."""

from __future__ import annotations

import asyncio
import io
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from relax_core.contracts.media import Media, MediaItem, MediaSource
from relax_core.contracts.media_file import write_item
from relax_core.contracts.tree import group_uid
from relax_core.data.media import played_files
from relax_core.data.media.item_encoder import clip_item, video_item
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_trial_main import TRIAL_AUDIO
from relax_core.data.media.played_files import PlayedFiles
from relax_core.observe.sample_log import PICTURES_FOLDER, PLAYED_FOLDER, SAMPLES_FOLDER, SampleLog
from relax_core.rollout.thumbnails import Thumbnails
from relax_core.server.run_folders import run_id
from tests.bus.make_media import make_item
from tests.data.media.make_files import video
from tests.data.media.make_sounds import stored
from tests.media_items import TOWER
from tests.server.browser import CHROMIUM, opened_browser
from tests.server.page_server import DEADLINE_S, Server
from tests.trees import answers_tree

RATE = 16_000
SOUND = stored(0.3 * np.sin(np.arange(2 * RATE) * 2 * np.pi * 440 / RATE)[:, None], "WAV")
FRAMES = [np.full((64, 96, 3), 12 * shade, np.uint8) for shade in range(16)]
NAMES = ("0" * 32, "1" * 32, "2" * 32, "../../config.yaml", "..%2f..%2fconfig.yaml")

Shown = tuple[Server, str, list[MediaItem]]


def wait_for_threads() -> None:
    """Waits for the threads that write thumbnails and copies."""
    for thread in threading.enumerate():
        if thread.name in ("thumbnail", "played-file"):
            thread.join(DEADLINE_S)


def sound_item(folder: Path, seed: int) -> MediaItem:
    features = np.random.default_rng(seed).standard_normal((128, 200), np.float32)
    return write_item(folder, *clip_item(TRIAL_AUDIO, features, 2.0))


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shown]:
    """Makes a run with one group (an image in the prompt, audio and video from files) and serves the run's page."""
    run_dir, media = tmp_path_factory.mktemp("runs") / "seen", tmp_path_factory.mktemp("media")
    samples = run_dir / SAMPLES_FOLDER
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: seen\n")
    (media / "tone.wav").write_bytes(SOUND)
    (media / "film.mp4").write_bytes(video(FRAMES))
    image, _ = make_item(media, 0, height=28, width=56)
    pixels = np.stack([frame[:56, :84] for frame in FRAMES[:4]])
    film = write_item(
        media, *video_item(TOWER, pixels, range(4), fps=8.0, height=64, width=96, tokenize=lambda words: [5])
    )
    items = [image, sound_item(media, 0), film]
    Thumbnails(run_dir / "thumbnails", media, first=0, pictures=samples / PICTURES_FOLDER).add(image)
    files = PlayedFiles(samples / PLAYED_FOLDER, root=media, limits=MediaLimits())
    files.add(items[1], MediaSource(kind="audio", path="tone.wav"))
    files.add(items[2], MediaSource(kind="video", path="film.mp4"))
    wait_for_threads()
    tree = answers_tree(group_uid(0), list(range(8)), [1, 1], [5, 6], rewards=[1.0, 0.0], versions=0)
    log = SampleLog(run_dir, worker="w", first=1, every=1, max_bytes=2**20)
    places = [Media(image, 0, 4), Media(items[1], 4, 6), Media(items[2], 6, 8)]
    log.lost(replace(tree, media=places))
    log.close(timeout_s=DEADLINE_S)
    server = Server(run_dir)
    server.enter()
    yield server, f"/api/run/{run_id(run_dir.resolve())}", items
    server.stop()


def test_the_page_gets_the_files_and_parts_of_them(shown: Shown) -> None:
    server, base, (image, sound, film) = shown
    found = server.json(f"{base}/sample?id=1")["media"]
    assert [(medium["kind"], medium["picture"], medium["played"]) for medium in found] == [
        ("image", True, False),
        ("audio", False, True),
        ("video", False, True),
    ]
    assert (found[0]["digest"], found[0]["rows"], found[0]["words"]) == (image.digest, 4, "[image 56×28]")
    status, headers, body = server.ask(f"{base}/picture/{image.digest}")
    assert (status, headers["content-type"], headers["x-content-type-options"]) == (200, "image/jpeg", "nosniff")
    with Image.open(io.BytesIO(body)) as picture:
        assert picture.size == (56, 28)
    status, headers, body = server.ask(f"{base}/media/{sound.digest}")
    assert (status, headers["content-type"], headers["x-content-type-options"]) == (200, "audio/wav", "nosniff")
    assert body == SOUND
    assert server.ask(f"{base}/media/{film.digest}")[1]["content-type"] == "video/mp4"
    status, headers, body = server.ask(f"{base}/media/{sound.digest}", Range="bytes=100-199")
    assert (status, body) == (206, SOUND[100:200])
    for path in (f"picture/{image.digest}", f"media/{sound.digest}"):
        assert server.ask(f"{base}/{path}", Authorization="")[0] == 401


@pytest.mark.parametrize(
    ("folder", "name", "wrong", "secret", "path"),
    [
        (PICTURES_FOLDER, "{}.jpg", b"<svg onload=alert(1)>", b"\xff\xd8\xff secret", "picture"),
        (PLAYED_FOLDER, "{}", b"<html><script>alert(1)</script>", SOUND, "media"),
    ],
    ids=["picture", "played"],
)
def test_media_outside_of_the_run_is_not_served(
    folder: str, name: str, wrong: bytes, secret: bytes, path: str, shown: Shown, tmp_path: Path
) -> None:
    server, base, items = shown
    kept = Path(server.json("/api/runs")[0]["folder"]) / SAMPLES_FOLDER / folder
    (kept / name.format(NAMES[0])).write_bytes(wrong)
    (tmp_path / "secret").write_bytes(secret)
    (kept / name.format(NAMES[1])).symlink_to(tmp_path / "secret")
    for digest in (*NAMES, items[0].digest.upper()):
        assert server.ask(f"{base}/{path}/{digest}")[0] == 404, digest


def test_pictures_come_at_a_rate_and_a_full_disk_costs_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(played_files, "ALL_OF", 2)
    monkeypatch.setattr(played_files, "PAUSE_S", 3600.0)
    items = [make_item(tmp_path, seed)[0] for seed in range(5)]
    writer = Thumbnails(tmp_path / "first", tmp_path, first=1, pictures=tmp_path / "pictures")
    for item in [*items, items[0]]:
        writer.add(item)
        wait_for_threads()
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == {item.digest for item in items[:2]}
    assert [path.name for path in (tmp_path / "first").iterdir()] == [f"00-image-{items[0].digest[:8]}.png"]
    (tmp_path / "in_the_way").write_text("")
    Thumbnails(tmp_path / "none", tmp_path, first=0, pictures=tmp_path / "in_the_way").add(items[3])
    wait_for_threads()
    assert "The run goes on" in caplog.text
    assert np.asarray(Image.open(tmp_path / "pictures" / f"{items[0].digest}.jpg")).shape == (28, 28, 3)


def test_files_that_are_large_or_too_many_and_sources_outside_the_root_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(played_files, "MAX_FILE_BYTES", len(SOUND))
    monkeypatch.setattr(played_files, "MAX_BYTES", 4 * len(SOUND))
    monkeypatch.setattr(played_files, "ALL_OF", 0)
    monkeypatch.setattr(played_files, "PAUSE_S", 3600.0)
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "outside.wav").write_bytes(SOUND)
    items = [sound_item(tmp_path, seed) for seed in range(7)]
    files = PlayedFiles(tmp_path / "kept", root=root, limits=MediaLimits())
    sources = [
        MediaSource(kind="audio", path="../outside.wav"),
        MediaSource(kind="audio", data=SOUND + b"\0"),
        *(MediaSource(kind="audio", data=SOUND) for _ in range(5)),
    ]
    for item, source in zip(items, sources, strict=True):
        files.add(item, source)
        wait_for_threads()
    assert {path.name for path in (tmp_path / "kept").iterdir()} == {item.digest for item in items[2:5]}
    assert "not below data.media_root" in caplog.text and "The run goes on" in caplog.text


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_the_browser_shows_and_plays_them(shown: Shown, tmp_path: Path) -> None:
    server, base, _ = shown

    async def look() -> None:
        async with opened_browser(tmp_path) as page:
            await page.size(1000, 700, dark=False)
            address = f"http://127.0.0.1:{server.port}/"
            await page.call("Page.navigate", url=f"{address}#token={server.session.link_token}")
            await page.until("document.querySelectorAll('#runs option').length")
            await page.run(f"location.hash = '#/{base.rpartition('/')[2]}/samples?id=1'")
            await page.until("document.querySelector('figure img')?.naturalWidth == 56")
            for name in ("audio", "video"):
                await page.until(f"Math.abs(document.querySelector('figure {name}')?.duration - 2) < 0.2")
                await page.run(f"document.querySelector('figure {name}').play()")
                await page.until(f"document.querySelector('figure {name}').currentTime > 0.2")
            assert await page.run("document.querySelector('figure video').videoWidth") == 96
            await page.picture(tmp_path / "players.png")
            assert page.errors == []

    asyncio.run(look())
