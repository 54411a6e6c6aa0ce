"""Tests that the wheel contains all files of the checkout's packages."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(folder), str(REPOSITORY)]
    subprocess.run(command, check=True, timeout=300)
    return next(folder.glob("relax_core-*.whl"))


@pytest.mark.soak
def test_wheel_has_code_and_conf(wheel: Path) -> None:
    packed = set(zipfile.ZipFile(wheel).namelist())
    given = [path for path in (REPOSITORY / "examples").rglob("*") if path.suffix in (".py", ".jsonl")]
    examples = {f"relax_core/{path.relative_to(REPOSITORY).as_posix()}" for path in given}
    conf = {f"relax_core/{path.relative_to(REPOSITORY).as_posix()}" for path in (REPOSITORY / "conf").rglob("*.yaml")}
    code = {
        path.relative_to(REPOSITORY).as_posix()
        for top in ("relax_core", "algorithms", "rewards", "envs", "data_sources", "launchers", "hydra_plugins")
        for path in (REPOSITORY / top).rglob("*.py")
    }
    shapes = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "relax_core").rglob("*.json")}
    templates = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "rewards").rglob("*.jinja")}
    static = (REPOSITORY / "relax_core" / "server" / "static").rglob("*")
    page = {path.relative_to(REPOSITORY).as_posix() for path in static if path.is_file()}
    assert shapes and templates and any(name.endswith("uPlot.LICENSE") for name in page)
    assert examples and examples | conf | code | shapes | templates | page <= packed
    assert not any(name.startswith(("tests/", "conf/", "docs/")) for name in packed)


@pytest.mark.soak
def test_an_installed_wheel_finds_its_conf(wheel: Path, tmp_path: Path) -> None:
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import relax_core, sys; from relax_core.config.options import conf_folder; "
        "from relax_core.config.compose import load_config; load_config(); print(conf_folder())"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert result.stdout.strip() == str(tmp_path / "relax_core" / "conf"), result.stderr


@pytest.mark.soak
def test_an_installed_wheel_plans_its_example_beside_a_project_of_the_same_names(wheel: Path, tmp_path: Path) -> None:
    installed, project = tmp_path / "installed", tmp_path / "project"
    zipfile.ZipFile(wheel).extractall(installed)
    for name in ("algorithms", "rewards", "envs", "data_sources", "launchers"):
        (project / name).mkdir(parents=True)
        (project / name / "__init__.py").write_text("raise RuntimeError('of the project')\n")
    for name, words in (("file", ["plan=true", "experiment=math_file"]), ("reverse_digits", ["demo", "plan=true"])):
        command = [sys.executable, "-m", "relax_core", *words]
        environment = {"PYTHONPATH": str(installed)}
        done = subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.startswith(f"tiny_qwen3-{name}: can start."), done.stderr
