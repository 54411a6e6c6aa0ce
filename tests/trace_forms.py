"""Runs one step of examples/one_loop.py and prints, as JSON, the forms that its samples took and the files they met.

A form is a class of ours whose instance itself holds a sample's tokens: their ids, the loss mask over them, or the
columns of bytes that carry them. A file is met where one of its functions takes a form or returns one, alone, in a
list, or as a field of another object.
"""

from __future__ import annotations

import json
import runpy
import sys
import threading
from collections import defaultdict
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OURS = ("relax_core", "algorithms", "rewards", "envs", "data_sources")
HOLDING = {"token_ids", "input_ids", "output_ids", "loss_mask", "columns"}
NO_SAMPLE = {"LeaseRequest"}  # its columns are names
FORMS: dict[str, set[str]] = defaultdict(set)  # class → the files that met it


def look(value: Any, file: str, *, depth: int = 0) -> None:
    if isinstance(value, list | tuple) and value and depth < 3:
        look(value[0], file, depth=depth + 1)
    if type(value).__module__.split(".")[0] not in OURS:
        return
    names = getattr(value, "__dataclass_fields__", None) or getattr(type(value), "__struct_fields__", ())
    if HOLDING.intersection(names) and type(value).__name__ not in NO_SAMPLE:
        FORMS[type(value).__name__].add(file)
    elif depth < 3:
        for name in names:
            look(getattr(value, name, None), file, depth=depth + 1)


def meet(frame: FrameType, event: str, argument: Any) -> None:
    code = frame.f_code
    file = code.co_filename.removeprefix(f"{ROOT}/")
    if event not in ("call", "return") or file.split("/")[0] not in OURS:
        return
    if event == "return":
        look(argument, file)
        return
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        look(frame.f_locals.get(name), file)


def main() -> None:
    loop = runpy.run_path(str(ROOT / "examples/one_loop.py"), run_name="read")
    threading.setprofile(meet)
    sys.setprofile(meet)
    loop["train"]("run.steps=1", "algo.group_size=2", "rollout.prompts_per_step=1")
    sys.setprofile(None)
    threading.setprofile(None)  # type: ignore[arg-type]  # which its stub does not know
    files = set().union(*FORMS.values())
    print(json.dumps({"forms": sorted(FORMS), "files": sorted(files)}))


if __name__ == "__main__":
    main()
