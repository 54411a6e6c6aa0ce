"""A picture in a sample: from the item that a run encodes to the page, and files that only call themselves pictures."""

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

from relax_core.contracts.media import Media, MediaItem
from relax_core.contracts.tree import group_uid
from relax_core.data.media import played_files
from relax_core.observe.sample_log import PICTURES_FOLDER, SAMPLES_FOLDER, SampleLog
from relax_core.rollout.thumbnails import Thumbnails
from relax_core.server.run_folders import run_id
from tests.bus.make_media import make_item
from tests.server.browser import CHROMIUM, opened_browser
from tests.server.page_server import DEADLINE_S, Server
from tests.trees import answers_tree


def wait_for_thumbnails() -> None:
    for thread in threading.enumerate():
        if thread.name == "thumbnail":
            thread.join(DEADLINE_S)


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str, MediaItem]]:
    """A run with one group whose prompt has an item, its picture, and the page's server."""
    run_dir = tmp_path_factory.mktemp("runs") / "seen"
    media = tmp_path_factory.mktemp("media")
    run_dir.mkdir()
    (run_dir / "config.yaml").write_text("name: seen\n")
    item, _ = make_item(media, 0, height=28, width=56)
    Thumbnails(run_dir / "thumbnails", media, first=0, pictures=run_dir / SAMPLES_FOLDER / PICTURES_FOLDER).add(item)
    wait_for_thumbnails()
    tree = answers_tree(group_uid(0), [0, 1, 2, 3, 9], [1, 1], [5, 6], rewards=[1.0, 0.0], versions=0)
    log = SampleLog(run_dir / SAMPLES_FOLDER, worker="w", attempt="a", start_step=0, first=1, every=1, max_bytes=2**20)
    uids = {one.uid: "zero_advantage" for one in tree.episodes}
    log.lost(replace(tree, media=[Media(item, 0, 4)]), uids)
    log.close(timeout_s=DEADLINE_S)
    server = Server(run_dir)
    server.enter()
    yield server, f"/api/run/{run_id(run_dir.resolve())}", item
    server.stop()


def test_the_page_gets_the_picture_of_an_item(shown: tuple[Server, str, MediaItem]) -> None:
    server, base, item = shown
    (one,) = server.json(f"{base}/sample?id=1")["media"]
    assert one == {
        "digest": item.digest,
        "rows": 4,
        "words": "[image 56×28]",
        "picture": True,
        "played": False,
        "kind": "image",
    }
    status, headers, body = server.ask(f"{base}/picture/{item.digest}")
    assert (status, headers["content-type"], headers["x-content-type-options"]) == (200, "image/jpeg", "nosniff")
    with Image.open(io.BytesIO(body)) as picture:
        assert picture.size == (56, 28)


def test_what_is_no_picture_of_the_run_is_not_given(shown: tuple[Server, str, MediaItem], tmp_path: Path) -> None:
    server, base, item = shown
    folder = Path(server.json("/api/runs")[0]["folder"]) / SAMPLES_FOLDER / PICTURES_FOLDER
    (folder / f"{'0' * 32}.jpg").write_text("<svg onload=alert(1)>")
    (tmp_path / "secret.jpg").write_bytes(b"\xff\xd8\xff secret")
    (folder / f"{'1' * 32}.jpg").symlink_to(tmp_path / "secret.jpg")
    for digest in ("0" * 32, "1" * 32, "2" * 32, "../../config.yaml", "..%2f..%2fconfig.yaml", item.digest.upper()):
        assert server.ask(f"{base}/picture/{digest}")[0] == 404, digest
    assert server.ask(f"{base}/picture/{item.digest}", Authorization="")[0] == 401


def test_pictures_come_at_a_rate_and_a_full_disk_costs_them_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(played_files, "ALL_OF", 2)
    monkeypatch.setattr(played_files, "PAUSE_S", 3600.0)
    items = [make_item(tmp_path, seed)[0] for seed in range(5)]
    writer = Thumbnails(tmp_path / "first", tmp_path, first=1, pictures=tmp_path / "pictures")
    for item in [*items, items[0]]:
        writer.add(item)
        wait_for_thumbnails()
    assert {path.stem for path in (tmp_path / "pictures").iterdir()} == {one.digest for one in items[:2]}
    assert [path.name for path in (tmp_path / "first").iterdir()] == [f"00-image-{items[0].digest[:8]}.png"]
    (tmp_path / "in_the_way").write_text("")
    Thumbnails(tmp_path / "none", tmp_path, first=0, pictures=tmp_path / "in_the_way").add(items[3])
    wait_for_thumbnails()
    assert "The run goes on" in caplog.text
    assert np.asarray(Image.open(tmp_path / "pictures" / f"{items[0].digest}.jpg")).shape == (28, 28, 3)


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: make dashboard-browser installs it as root")
def test_the_browser_shows_it(shown: tuple[Server, str, MediaItem], tmp_path: Path) -> None:
    server, base, _ = shown

    async def look() -> None:
        async with opened_browser(tmp_path) as page:
            await page.size(1000, 700, dark=False)
            address = f"http://127.0.0.1:{server.port}/"
            await page.call("Page.navigate", url=f"{address}#token={server.session.link_token}")
            await page.until("document.querySelectorAll('#runs option').length")
            await page.run(f"location.hash = '#/{base.rpartition('/')[2]}/samples?id=1'")
            await page.until("document.querySelector('figure img')?.naturalWidth == 56")
            await page.picture(tmp_path / "picture.png")
            assert page.errors == []

    asyncio.run(look())
