"""Lists the public docstrings of Relax, and finds docstrings without a verb in the first sentence.

python -m tests.docstrings --sample 60 --seed 13     # prints a random sample for a reader
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CODE = ("relax_core", "algorithms", "rewards", "envs", "data_sources", "launchers")
OPENS_WITH_A_VERB = re.compile(r"[A-Z][a-z-]*s\b")
VERB = re.compile(
    r"\b(is|are|has|have|was|were|may|can|must|could|do|does|holds|says|gives|takes|makes|reads|writes|starts|ends|runs|sends"
    r"|computes|gets|keeps|uses|goes|belongs|contains|describes|follows|serves|finds|sets|waits|trains|fails|lets|counts"
    r"|names|answers|aborts|divides|passed|refused|did|died|expired|agrees|exists|needs|stands)\b"
)


def public_docstrings() -> Iterator[tuple[str, str]]:
    """Yields the dotted name and the first paragraph of each public class, method and function that has a docstring."""
    for folder in CODE:
        for file in sorted((ROOT / folder).rglob("*.py")):
            yield from _below(ast.parse(file.read_text(encoding="utf-8")), prefix=f"{file.relative_to(ROOT)}: ")


def has_verb(text: str) -> bool:
    """Returns whether the first sentence begins with a verb in the third person or contains a known verb."""
    first = re.split(r"(?<=\.)\s", text)[0]
    return OPENS_WITH_A_VERB.match(text) is not None or VERB.search(first) is not None


def _below(node: ast.AST, *, prefix: str) -> Iterator[tuple[str, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and not child.name.startswith("_"):
            if (text := ast.get_docstring(child)) is not None:
                yield prefix + child.name, text.split("\n\n")[0].replace("\n", " ")
            if isinstance(child, ast.ClassDef):
                yield from _below(child, prefix=f"{prefix}{child.name}.")


def main() -> None:
    """Prints a sample of the docstrings."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sample", type=int, default=60)
    parser.add_argument("--seed", type=int, default=13)
    arguments = parser.parse_args()
    random.seed(arguments.seed)
    for name, text in random.sample(list(public_docstrings()), arguments.sample):
        print(f"{name}\n    {text}")


if __name__ == "__main__":
    main()
