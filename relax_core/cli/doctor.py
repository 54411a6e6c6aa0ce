"""`relax doctor` checks whether runs can work on this machine.

It also finds remaining files and processes of killed runs.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from relax_core.config.compose import load_config
from relax_core.contracts.child_process import cause_in, module_command
from relax_core.control.host.run_paths import SHARED_MEMORY, find_stale_runs, remove_stale_runs, temporary_folder
from relax_core.observe.process_usage import available_bytes
from relax_core.plan.build_plan import make_plan
from relax_core.plan.memory_terms import size_text

CORES, DISK_BYTES, SHARED_BYTES = 2, 2 << 30, 512 << 20
_NVIDIA_S = 10.0
_MEDIA_S = 60.0
_INSTRUCTIONS = "if-verifiable"
_OPTIONAL = {  # package → features that need the package, and extra that installs it
    "pylatexenc": ("reward=deepscaler, geo3k and math with rule=boxed", "rewards"),
    _INSTRUCTIONS: ("reward=ifeval and ifbench", "rewards"),
    "reasoning-gym": ("data=reasoning_gym with its reward", "envs"),
    "gymnasium": ("env=gymnasium", "envs"),
    "textarena": ("env=textarena", "envs"),
    "mcp": ("env=mcp", "mcp"),
}
_NLTK_DATA = {
    "punkt": "tokenizers",
    "punkt_tab": "tokenizers",
    "stopwords": "corpora",
    "averaged_perceptron_tagger_eng": "taggers",
}  # nltk data for some instructions of IFEval and IFBench → folder of the data
_MEDIA_LIBRARIES = {"av": "PyAV", "PIL": "Pillow", "soundfile": "soundfile", "soxr": "soxr"}


class Verdict(Enum):
    """Rates a finding: `bad` prevents runs, `note` does not."""

    good = "ok"
    note = "note"
    bad = "BAD"


@dataclass(frozen=True, kw_only=True)
class DoctorFinding:
    """Holds one finding. ``message`` describes the finding and, unless the verdict is `good`, the fix."""

    topic: str
    verdict: Verdict
    message: str


def main(message: Sequence[str]) -> int:
    """Runs `relax doctor [--clean]` and returns the exit code. Argparse ends the process for unknown arguments."""
    parser = argparse.ArgumentParser(prog="relax doctor", description=__doc__)
    parser.add_argument("--clean", action="store_true", help="first remove the files and processes of killed runs")
    return doctor_command(clean=parser.parse_args(message).clean)


def doctor_command(*, clean: bool = False) -> int:
    """Prints all findings. Returns 1 if runs cannot work, else 0.

    With ``clean``, first removes the remaining files and processes of killed runs, and prints their names.
    """
    for stale_run in remove_stale_runs() if clean else ():
        print(stale_run.removal())
    findings = [finding for check in _CHECKS for finding in check()]
    for finding in findings:
        print(f"{finding.verdict.value:<5} {finding.topic:<14} {finding.message}")
    bad = sum(finding.verdict is Verdict.bad for finding in findings)
    print(f"\n{bad} of {len(findings)} problems prevent runs." if bad else "\nA run can work here.")
    return 1 if bad else 0


def _python() -> Iterator[DoctorFinding]:
    found = ".".join(map(str, sys.version_info[:3]))
    place = f"{found} at {sys.executable}"
    if sys.version_info[:2] == (3, 11):
        yield DoctorFinding(topic="python", verdict=Verdict.good, message=place)
    elif (3, 11) < sys.version_info[:2] <= (3, 13):
        yield DoctorFinding(topic="python", verdict=Verdict.note, message=f"{place}; Relax is tested with 3.11")
    else:
        message = f"{place}; Relax needs 3.11, 3.12 or 3.13: make env PYTHON=/path/to/python3.11"
        yield DoctorFinding(topic="python", verdict=Verdict.bad, message=message)


def _libraries() -> Iterator[DoctorFinding]:
    for library in versions():
        if library.found is None:
            message = f"{library.name} is missing. Install it: make env"
            yield DoctorFinding(topic="library", verdict=Verdict.bad, message=message)
        elif library.tested not in (None, library.found):
            message = f"{library.name} {library.found}, tested with {library.tested} (constraints.txt)"
            yield DoctorFinding(topic="library", verdict=Verdict.note, message=message)
    count = len(versions())
    yield DoctorFinding(
        topic="libraries", verdict=Verdict.good, message=f"{count} checked; all not named here are as tested"
    )


def _machine() -> Iterator[DoctorFinding]:
    cores = len(os.sched_getaffinity(0))
    message = f"{cores} cores" + ("" if cores >= CORES else f"; rollout and trainer need one each. Give it {CORES}")
    yield DoctorFinding(topic="cores", verdict=Verdict.good if cores >= CORES else Verdict.note, message=message)
    free, demo = available_bytes(), make_plan(load_config()).total_bytes
    message = f"{size_text(free)} free, the demo takes {size_text(demo)}"
    verdict = Verdict.good if free >= demo else Verdict.bad
    yield DoctorFinding(
        topic="memory", verdict=verdict, message=message + ("" if free >= demo else ". Close other programs")
    )


def _shared_memory() -> Iterator[DoctorFinding]:
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        message = f"{SHARED_MEMORY} does not exist or cannot be written to, but weights need it. Mount a tmpfs"
        yield DoctorFinding(topic="shared memory", verdict=Verdict.bad, message=message)
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    enough = free >= SHARED_BYTES
    message = f"{size_text(free)} free in {SHARED_MEMORY}"
    more = f"; a run needs at least {size_text(SHARED_BYTES)}. In a container: --shm-size=2g"
    yield DoctorFinding(
        topic="shared memory",
        verdict=Verdict.good if enough else Verdict.bad,
        message=message + ("" if enough else more),
    )


def _disk() -> Iterator[DoctorFinding]:
    for topic, folder in (("disk, runs", Path.cwd()), ("disk, /tmp", temporary_folder())):
        free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
        message = f"{size_text(free)} free in {folder}" + ("" if writable else ", which cannot be written to")
        enough = Verdict.good if free >= DISK_BYTES else Verdict.note
        verdict = enough if writable else Verdict.bad
        yield DoctorFinding(topic=topic, verdict=verdict, message=message)


def _ports() -> Iterator[DoctorFinding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        message = f"no free port on 127.0.0.1: {error.strerror}. Engines and Ray need loopback"
        yield DoctorFinding(topic="ports", verdict=Verdict.bad, message=message)
        return
    yield DoctorFinding(topic="ports", verdict=Verdict.good, message=f"127.0.0.1 has free ports, such as {port}")


def _gpus() -> Iterator[DoctorFinding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield DoctorFinding(topic="GPUs", verdict=Verdict.good, message="none (no nvidia-smi); runs use CPU cores")
        return
    query = [tool, "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_S, check=False)
    except subprocess.TimeoutExpired:
        yield DoctorFinding(
            topic="GPUs", verdict=Verdict.note, message=f"nvidia-smi gave no answer in {_NVIDIA_S:.0f} s"
        )
        return
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().split("\n")[0]
        yield DoctorFinding(topic="GPUs", verdict=Verdict.note, message=f"nvidia-smi fails: {reason}")
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        yield DoctorFinding(
            topic="GPU", verdict=Verdict.good, message=f"{line.strip()}; a run uses it with placement=gpu"
        )


def _media() -> Iterator[DoctorFinding]:
    missing = [name for module, name in _MEDIA_LIBRARIES.items() if find_spec(module) is None]
    if missing:
        message = f"{' and '.join(missing)} missing. Only multimodal models need them: pip install 'relax-core[omni]'"
        yield DoctorFinding(topic="media", verdict=Verdict.note, message=message)
        return
    command = module_command("relax_core.data.media.media_trial_main")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEDIA_S, check=False)
    except subprocess.TimeoutExpired:
        yield DoctorFinding(
            topic="media", verdict=Verdict.bad, message=f"six small files were not decoded in {_MEDIA_S:.0f} s"
        )
        return
    if done.returncode != 0:
        reason = cause_in(done.stderr) or f"the process ended with {done.returncode}"
        message = f"media cannot be decoded: {reason}. Install again: pip install 'relax-core[omni]'"
        yield DoctorFinding(topic="media", verdict=Verdict.bad, message=message)
        return
    yield DoctorFinding(topic="media", verdict=Verdict.good, message=f"{done.stdout.strip()} are decoded")


def _optional() -> Iterator[DoctorFinding]:
    """Yields findings about optional packages and data of rewards and environments."""
    found = []
    for package, (what, extra) in _OPTIONAL.items():
        if _is_installed(package):
            found.append(package)
            continue
        message = f"{package} is missing. Only {what} needs it: pip install 'relax-core[{extra}]'"
        yield DoctorFinding(topic="optional", verdict=Verdict.note, message=message)
    missing = [resource for resource in _NLTK_DATA if not _has_nltk_data(resource)] if _INSTRUCTIONS in found else []
    if missing:
        message = (
            f"data of nltk is missing: {', '.join(missing)}. Only some instructions of reward=ifeval and ifbench need "
            f"it: python -m nltk.downloader {' '.join(missing)}"
        )
        yield DoctorFinding(topic="optional", verdict=Verdict.note, message=message)
    if found:
        yield DoctorFinding(topic="optional", verdict=Verdict.good, message=f"{', '.join(found)} there")


def _is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def _has_nltk_data(name: str) -> bool:
    import nltk

    try:
        nltk.data.find(f"{_NLTK_DATA[name]}/{name}")
    except LookupError:
        return False
    return True


def _stale_runs() -> Iterator[DoctorFinding]:
    found = find_stale_runs()
    for stale_run in found:
        message = f"{stale_run}. The next run removes it, or: relax doctor --clean"
        yield DoctorFinding(topic="left behind", verdict=Verdict.note, message=message)
    if not found:
        yield DoctorFinding(topic="left behind", verdict=Verdict.good, message="no files or processes of killed runs")


_CHECKS: tuple[Callable[[], Iterator[DoctorFinding]], ...] = (
    _python,
    _libraries,
    _machine,
    _shared_memory,
    _disk,
    _ports,
    _gpus,
    _media,
    _optional,
    _stale_runs,
)


_CONSTRAINTS = Path(__file__).resolve().parents[2] / "constraints.txt"
_NAME = re.compile(r"[A-Za-z0-9._-]+")


@dataclass(frozen=True, kw_only=True)
class LibraryVersion:
    """Holds the versions of one library.

    ``found`` is None if the library is not installed. ``tested`` is None if constraints.txt does not exist or does not
    name the library.
    """

    name: str
    found: str | None
    tested: str | None


def versions() -> list[LibraryVersion]:
    """Returns the versions of Relax's dependencies, without the dependencies of its extras."""
    tested = _tested()
    return [
        LibraryVersion(name=name, found=_found(name), tested=tested.get(_normal(name))) for name in sorted(_required())
    ]


def _required() -> set[str]:
    lines = importlib.metadata.requires("relax-core") or []
    plain = [line for line in lines if "extra ==" not in line]
    return {match[0] for line in plain if (match := _NAME.match(line))}


def _tested() -> dict[str, str]:
    """Returns name → tested version. Empty in an installed wheel, which has no constraints.txt."""
    if not _CONSTRAINTS.is_file():
        return {}
    pins = [line.split("#")[0].strip().split("==") for line in _CONSTRAINTS.read_text(encoding="utf-8").splitlines()]
    return {_normal(pin[0]): pin[1].split(";")[0].strip() for pin in pins if len(pin) == 2}


def _found(name: str) -> str | None:
    try:
        return importlib.metadata.version(name).split("+")[0]
    except importlib.metadata.PackageNotFoundError:
        return None


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
