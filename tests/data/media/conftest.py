"""Shares one encode pool between all media tests. Its workers are started once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from relax_core.contracts.media import MediaError, MediaItem, MediaKind, MediaSource
from relax_core.data.media.encode_pool import EncodePool, EncodeSettings
from relax_core.data.media.media_limits import MediaLimits
from relax_core.data.media.media_trial_main import TRIAL_SETTINGS
from relax_core.families.architecture import PatchSettings
from relax_core.tools.tiny_text import write_prompt_tokenizer

Encode = Callable[[MediaSource], MediaItem]
MakeSettings = Callable[..., EncodeSettings]

# The limit is small enough to detect a hostile file, and large enough for the interpreter and both libraries.
LIMITS = MediaLimits(
    source_pixels=4_000_000, item_bytes=8 << 20, source_frames=1_000, source_seconds=100.0, worker_bytes=768 << 20
)


@contextmanager
def refused(word: str, told: str = "") -> Iterator[None]:
    """Fails if media are not refused with the reason ``word`` and an error that contains the text ``told``."""
    with pytest.raises(MediaError) as error:
        yield
    assert error.value.word == word and told in str(error.value), str(error.value)


def check_hostile(encode: Encode, root: Path, name: str, case: tuple[MediaKind, str, Callable[[], bytes]]) -> None:
    """Fails if a file is not refused with this reason, both as a path below the root and as bytes in a row."""
    kind, word, content = case
    data = content()
    (root / name).write_bytes(data)
    for source in (MediaSource(kind=kind, path=name), MediaSource(kind=kind, data=data)):
        with pytest.raises(MediaError) as error:
            encode(source)
        assert error.value.word == word, str(error.value)
        assert str(error.value).startswith(source.description)
        assert error.value.reason == f"bad_media:{word}" and error.value.kind == kind


def check_memory(pool: EncodePool, started: list[int]) -> None:
    """Fails if a worker was replaced or its address space exceeded the limit."""
    assert [worker.pid for worker in pool.workers] == started
    for pid in started:
        status = Path(f"/proc/{pid}/status").read_text()
        peak = next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmPeak"))
        assert peak <= LIMITS.worker_bytes


@pytest.fixture(scope="session")
def make_settings(tmp_path_factory: pytest.TempPathFactory) -> MakeSettings:
    """Returns a function that makes settings with a new root and a new media folder, and optional limits."""
    model = tmp_path_factory.mktemp("model")
    write_prompt_tokenizer(model, vision=True)

    def make(limits: MediaLimits = LIMITS, tower: PatchSettings = TRIAL_SETTINGS) -> EncodeSettings:
        folder = tmp_path_factory.mktemp("media")
        (folder / "items").mkdir()
        (folder / "root").mkdir()
        return EncodeSettings(
            model_folder=str(model), tower=tower, limits=limits, root=str(folder / "root"), folder=str(folder / "items")
        )

    return make


@pytest.fixture(scope="session")
def settings(make_settings: MakeSettings) -> EncodeSettings:
    return make_settings()


@pytest.fixture(scope="session")
def root(settings: EncodeSettings) -> Path:
    return Path(settings.root)


@pytest.fixture(scope="session")
def pool(settings: EncodeSettings) -> Iterator[EncodePool]:
    with EncodePool(settings, workers=2) as pool:
        yield pool


@pytest.fixture(scope="session")
def encode(pool: EncodePool) -> Encode:
    return lambda source: asyncio.run(pool.encode(source))
