"""Records in every process of a run the classes that hold samples (forms), and the files that use these classes.

Python imports this module at the start of each process with this folder in its PYTHONPATH. A form is a class of Relax
with instances that hold a sample's tokens: token ids, the loss mask over tokens, or byte columns that contain tokens. A
file uses a form if one of its functions takes or returns an instance: alone, in a list, or as a field of an object.
Each process appends lines `CLASS FILE` to a separate file in the folder RELAX_FORM_TRACE.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FrameType
from typing import Any

OURS = ("relax_core", "algorithms", "rewards", "envs", "data_sources")
HOLDING = {"token_ids", "input_ids", "output_ids", "loss_mask", "columns"}
NO_SAMPLE = {"LeaseRequest"}  # its columns are only names
DEEPEST = 3
ROOT = f"{os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))}/"
FOLDER = os.environ.get("RELAX_FORM_TRACE", "")
MET: set[tuple[str, str]] = set()


def look(value: Any, file: str, *, depth: int = 0) -> None:
    """Records the form of ``value``, or the forms in its elements or fields."""
    if isinstance(value, list | tuple) and value and depth < DEEPEST:
        look(value[0], file, depth=depth + 1)
    kind = type(value)
    if kind.__module__.split(".")[0] not in OURS:
        return
    names = getattr(kind, "__dataclass_fields__", None) or getattr(kind, "__struct_fields__", ())
    if HOLDING.intersection(names) and kind.__name__ not in NO_SAMPLE:
        if (kind.__name__, file) not in MET:
            MET.add((kind.__name__, file))
            with open(os.path.join(FOLDER, str(os.getpid())), "a", encoding="utf-8") as lines:
                lines.write(f"{kind.__name__} {file}\n")
    elif depth < DEEPEST:
        for name in names:
            look(getattr(value, name, None), file, depth=depth + 1)


def meet(frame: FrameType, event: str, argument: Any) -> None:
    """Handles a profile event of any thread: records the forms in the arguments or the result of a function."""
    code = frame.f_code
    file = code.co_filename.removeprefix(ROOT)
    if event not in ("call", "return") or file.split("/")[0] not in OURS:
        return
    if event == "return":
        look(argument, file)
        return
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        look(frame.f_locals.get(name), file)


if FOLDER:
    threading.setprofile(meet)
    sys.setprofile(meet)
