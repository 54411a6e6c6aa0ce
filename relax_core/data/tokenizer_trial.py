"""Loads a model folder's tokenizer and chat template in a separate process, with limits on time and memory.

A template is a program. Its compilation or rendering may never end, or may allocate memory without bound. After a
successful trial, this process and the processes of the run load the folder and report all further problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from relax_core.contracts.child_process import ChildLost, WorkerProcess
from relax_core.data.chat_template import TEMPLATE_FILES
from relax_core.families.hf_config import CONFIG_FILE

MEMORY_GIB = 2.0
LOAD_S, RENDER_S = 30.0, 2.0  # limits of CPU time; the largest tokenizers take 2 s, and templates some milliseconds
_WALL = 10.0  # allowed wall time per CPU time, for a busy machine
_MAIN = "relax_core.data.tokenizer_trial_main"
_FILES = (CONFIG_FILE, "tokenizer.json", *TEMPLATE_FILES)
_passed: set[tuple[Any, ...]] = set()  # the states of folders that passed the trial in this process


class TokenizerTrial(msgspec.Struct, frozen=True, kw_only=True):
    """Holds the task of the trial process; without ``template`` it tries only the tokenizer."""

    folder: str
    arguments: dict[str, Any]
    template: bool


class TrialResult(msgspec.Struct, frozen=True):
    """Holds the trial process's answer to one message: the error that a limit caused, or an empty text."""

    problem: str


def try_tokenizer(folder: Path, *, arguments: Mapping[str, Any] | None = None, template: bool = True) -> None:
    """Raises ValueError for a tokenizer or a chat template that takes too much time or memory, or ends its process.

    ``arguments`` are variables for the chat template. An unchanged folder is tried only once.
    """
    state = (str(folder), repr(sorted((arguments or {}).items())), template, *map(_state, _files(folder)))
    if state in _passed:
        return
    trial = TokenizerTrial(folder=str(folder), arguments=dict(arguments or {}), template=template)
    process = WorkerProcess([_MAIN], trial, name=f"model folder {folder}: the trial of its tokenizer")
    try:
        _ask(process, "load", LOAD_S, f"model folder {folder}: its tokenizer.json", "the tokenizer")
        if template:
            _ask(process, "render", RENDER_S, f"model folder {folder}: its chat template", "the chat template")
    finally:
        process.stop()
        process.close_pipes()
    _passed.add(state)


def _ask(process: WorkerProcess, message: str, limit_s: float, what: str, part: str) -> None:
    try:
        problem = msgspec.msgpack.decode(process.ask(message, limit_s=_WALL * limit_s), type=TrialResult).problem
    except ChildLost as lost:
        problem = f"its process was lost ({lost})"
    if problem:
        raise ValueError(
            f"{what} needs more than {limit_s:g} s of computing or {MEMORY_GIB:g} GiB of memory: {problem}. Give "
            f"{part} that belongs to the model."
        )


def _files(folder: Path) -> list[Path]:
    return [folder / name for name in _FILES]


def _state(file: Path) -> tuple[int, int, int] | None:
    if not file.is_file():
        return None
    stat = file.stat()
    return stat.st_size, stat.st_mtime_ns, stat.st_ino
