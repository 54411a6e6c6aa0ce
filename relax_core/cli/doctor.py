"""`relax doctor` checks whether runs can work on this machine, and finds files and processes that killed runs left."""

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
from relax_core.contracts.child import cause_in, module_command
from relax_core.control.host.run_paths import SHARED_MEMORY, find_stale_runs, remove_stale_runs, temporary_folder
from relax_core.observe.process_usage import available_bytes
from relax_core.plan.build_plan import make_plan
from relax_core.plan.memory_terms import size_words

CORES, DISK_BYTES, SHARED_BYTES = 2, 2 << 30, 512 << 20
_NVIDIA_S = 10.0
_MEDIA_S = 60.0
_INSTRUCTIONS = "if-verifiable"
_OPTIONAL = {  # package → the features that need it, and the extra that installs it
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
}  # nltk data that some instructions of IFEval and IFBench need → its folder
_MEDIA_LIBRARIES = {"av": "PyAV", "PIL": "Pillow", "soundfile": "soundfile", "soxr": "soxr"}


class Verdict(Enum):
    """Rates a finding: `bad` prevents runs, `note` does not."""

    good = "ok"
    note = "note"
    bad = "BAD"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Holds one finding; ``words`` describes it and, if it is not good, the fix."""

    topic: str
    verdict: Verdict
    words: str


def main(words: Sequence[str]) -> int:
    """Runs `relax doctor [--clean]`; returns the exit code. Argparse ends the process for unknown arguments."""
    parser = argparse.ArgumentParser(prog="relax doctor", description=__doc__)
    parser.add_argument("--clean", action="store_true", help="first remove the remains of killed runs")
    return doctor_command(clean=parser.parse_args(words).clean)


def doctor_command(*, clean: bool = False) -> int:
    """Prints every finding; returns 1 if runs cannot work, else 0.

    With ``clean``, it first removes the remaining files and processes of killed runs, and prints them.
    """
    for stale_run in remove_stale_runs() if clean else ():
        print(stale_run.removal())
    findings = [finding for check in _CHECKS for finding in check()]
    for finding in findings:
        print(f"{finding.verdict.value:<5} {finding.topic:<14} {finding.words}")
    bad = sum(finding.verdict is Verdict.bad for finding in findings)
    print(f"\n{bad} of {len(findings)} findings keep a run from working." if bad else "\nA run can work here.")
    return 1 if bad else 0


def _python() -> Iterator[Finding]:
    found = ".".join(map(str, sys.version_info[:3]))
    right = sys.version_info[:2] == (3, 11)
    words = f"{found} at {sys.executable}" + (
        "" if right else "; Relax needs 3.11: make env PYTHON=/path/to/python3.11"
    )
    yield Finding(topic="python", verdict=Verdict.good if right else Verdict.bad, words=words)


def _libraries() -> Iterator[Finding]:
    for library in versions():
        if library.found is None:
            words = f"{library.name} is missing. Install it: make env"
            yield Finding(topic="library", verdict=Verdict.bad, words=words)
        elif library.tested not in (None, library.found):
            words = f"{library.name} {library.found}, tested with {library.tested} (constraints.txt)"
            yield Finding(topic="library", verdict=Verdict.note, words=words)
    count = len(versions())
    yield Finding(topic="libraries", verdict=Verdict.good, words=f"{count} checked; those not named are as tested")


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0))
    words = f"{cores} cores" + ("" if cores >= CORES else f"; rollout and trainer need one each. Give it {CORES}")
    yield Finding(topic="cores", verdict=Verdict.good if cores >= CORES else Verdict.note, words=words)
    free, demo = available_bytes(), make_plan(load_config()).total_bytes
    words = f"{size_words(free)} free, the demo takes {size_words(demo)}"
    verdict = Verdict.good if free >= demo else Verdict.bad
    yield Finding(topic="memory", verdict=verdict, words=words + ("" if free >= demo else ". Close other programs"))


def _shared_memory() -> Iterator[Finding]:
    if not SHARED_MEMORY.is_dir() or not os.access(SHARED_MEMORY, os.W_OK):
        words = f"{SHARED_MEMORY} does not exist or cannot be written to, but weights need it. Mount a tmpfs"
        yield Finding(topic="shared memory", verdict=Verdict.bad, words=words)
        return
    free = shutil.disk_usage(SHARED_MEMORY).free
    enough = free >= SHARED_BYTES
    words = f"{size_words(free)} free in {SHARED_MEMORY}"
    more = f"; a run needs at least {size_words(SHARED_BYTES)}. In a container: --shm-size=2g"
    yield Finding(
        topic="shared memory",
        verdict=Verdict.good if enough else Verdict.bad,
        words=words + ("" if enough else more),
    )


def _disk() -> Iterator[Finding]:
    for topic, folder in (("disk, runs", Path.cwd()), ("disk, /tmp", temporary_folder())):
        free, writable = shutil.disk_usage(folder).free, os.access(folder, os.W_OK)
        words = f"{size_words(free)} free in {folder}" + ("" if writable else ", which cannot be written to")
        enough = Verdict.good if free >= DISK_BYTES else Verdict.note
        verdict = enough if writable else Verdict.bad
        yield Finding(topic=topic, verdict=verdict, words=words)


def _ports() -> Iterator[Finding]:
    try:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
    except OSError as error:
        words = f"no free port on 127.0.0.1: {error.strerror}. Engines and Ray need loopback"
        yield Finding(topic="ports", verdict=Verdict.bad, words=words)
        return
    yield Finding(topic="ports", verdict=Verdict.good, words=f"127.0.0.1 has free ports, such as {port}")


def _gpus() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding(topic="GPUs", verdict=Verdict.good, words="none (no nvidia-smi); runs use CPU cores")
        return
    query = [tool, "--query-gpu=index,name,memory.total,memory.used", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=_NVIDIA_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(topic="GPUs", verdict=Verdict.note, words=f"nvidia-smi gave no answer in {_NVIDIA_S:.0f} s")
        return
    if done.returncode != 0:
        reason = (done.stdout + done.stderr).strip().split("\n")[0]
        yield Finding(topic="GPUs", verdict=Verdict.note, words=f"nvidia-smi fails: {reason}")
    for line in done.stdout.splitlines() if done.returncode == 0 else []:
        yield Finding(topic="GPU", verdict=Verdict.good, words=f"{line.strip()}; a run uses it with placement=gpu")


def _media() -> Iterator[Finding]:
    missing = [name for module, name in _MEDIA_LIBRARIES.items() if find_spec(module) is None]
    if missing:
        words = f"{' and '.join(missing)} missing. Only multimodal models need them: pip install 'relax-core[omni]'"
        yield Finding(topic="media", verdict=Verdict.note, words=words)
        return
    command = module_command("relax_core.data.media.media_trial_main")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_MEDIA_S, check=False)
    except subprocess.TimeoutExpired:
        yield Finding(topic="media", verdict=Verdict.bad, words=f"six small files were not decoded in {_MEDIA_S:.0f} s")
        return
    if done.returncode != 0:
        reason = cause_in(done.stderr) or f"the process ended with {done.returncode}"
        words = f"media cannot be decoded: {reason}. Install again: pip install 'relax-core[omni]'"
        yield Finding(topic="media", verdict=Verdict.bad, words=words)
        return
    yield Finding(topic="media", verdict=Verdict.good, words=f"{done.stdout.strip()} are decoded")


def _optional() -> Iterator[Finding]:
    """Yields the installed and missing optional packages and data of rewards and environments."""
    found = []
    for package, (what, extra) in _OPTIONAL.items():
        if _is_installed(package):
            found.append(package)
            continue
        words = f"{package} is missing. Only {what} needs it: pip install 'relax-core[{extra}]'"
        yield Finding(topic="optional", verdict=Verdict.note, words=words)
    missing = [resource for resource in _NLTK_DATA if not _has_nltk_data(resource)] if _INSTRUCTIONS in found else []
    if missing:
        words = (
            f"data of nltk is missing: {', '.join(missing)}. Only some instructions of reward=ifeval and ifbench need "
            f"it: python -m nltk.downloader {' '.join(missing)}"
        )
        yield Finding(topic="optional", verdict=Verdict.note, words=words)
    if found:
        yield Finding(topic="optional", verdict=Verdict.good, words=f"{', '.join(found)} there")


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


def _stale_runs() -> Iterator[Finding]:
    found = find_stale_runs()
    for stale_run in found:
        words = f"{stale_run}. The next run removes it, or: relax doctor --clean"
        yield Finding(topic="left behind", verdict=Verdict.note, words=words)
    if not found:
        yield Finding(topic="left behind", verdict=Verdict.good, words="nothing of killed runs")


_CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
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

    ``found`` is None if it is not installed. ``tested`` is None if constraints.txt does not exist or does not name it.
    """

    name: str
    found: str | None
    tested: str | None


def versions() -> list[LibraryVersion]:
    """Returns the versions of the libraries that Relax depends on, without those of its extras."""
    tested = _tested()
    return [
        LibraryVersion(name=name, found=_found(name), tested=tested.get(_normal(name))) for name in sorted(_required())
    ]


def _required() -> set[str]:
    lines = importlib.metadata.requires("relax-core") or []
    plain = [line for line in lines if "extra ==" not in line]
    return {match[0] for line in plain if (match := _NAME.match(line))}


def _tested() -> dict[str, str]:
    """Maps names to tested versions; it is empty in an installed wheel, which has no constraints.txt."""
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
