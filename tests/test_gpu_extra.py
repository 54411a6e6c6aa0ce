"""Tests that the GPU extra and the pip commands of docker/Dockerfile find compatible versions, and what it copies."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from relax_core.engines.sglang.sglang_process import version_problem

ROOT = Path(__file__).resolve().parents[1]
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ")
COPIES = [line.split() for line in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE)]  # sources, then the target
INSTALLS = [shlex.split(words) for words in re.findall(r"\bpip install ([^&\n]+)", DOCKERFILE)]


def test_the_image_has_all_that_the_package_needs() -> None:
    build = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["hatch"]["build"]
    wheel = build["targets"]["wheel"]
    copied = {source for *sources, _ in COPIES for source in sources}
    assert {*wheel["packages"], *wheel["force-include"]} <= copied
    assert any(".[gpu]" in words for words in INSTALLS)


@pytest.mark.soak  # the network and some minutes each
@pytest.mark.parametrize("words", [[".[gpu]"], *INSTALLS], ids=lambda words: " ".join(words))
def test_what_pip_is_asked_to_install_resolves(words: list[str], tmp_path: Path) -> None:
    """Asks pip's resolver in a folder with only what the image has, as if nothing were installed."""
    for *sources, target in COPIES:
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--no-input", "--ignore-installed", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (found,) = re.findall(r"Would install .*\bsglang-(\d\S*)", done.stdout)
    assert version_problem(found) is None
