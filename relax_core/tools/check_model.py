"""`relax check-model FOLDER` checks whether a run can use a Hugging Face folder.

The check reads config.json, the tokenizer, the chat template and the headers of the weight files, but no tensor. So it
takes seconds for a model of any size. A run needs no conversion of the folder: each rank reads its slices from it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.config.model_checks import file_problems
from relax_core.config.options import yaml_options
from relax_core.data.tokenizer import PromptTokenizer, vocabulary_problem
from relax_core.data.tokenizer_trial import try_tokenizer
from relax_core.families.folder import family_key, folder_architecture
from relax_core.observe.standard_streams import unread_streams
from relax_core.train.hf.stored_weights import stored_weights, weight_problems

SHOWN = 20  # limit of printed problems; a wrong folder may have thousands


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line. Returns 0, or prints problems to stderr and returns 2 if the folder cannot be loaded."""
    parser = argparse.ArgumentParser(prog="relax check-model", description=__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    parser.add_argument("--family", help="a model family, by name or file, in addition to the built-in families")
    parsed = parser.parse_args(arguments)
    folder = parsed.folder
    problems = list(file_problems(folder, key="model.path"))
    if not problems:
        try:
            architecture = folder_architecture(folder, also=parsed.family)
            problems = weight_problems(folder, architecture) + _tokenizer_problems(folder)
        except ValueError as error:
            problems = [str(error)]
    for problem in problems[:SHOWN]:
        print(f"relax: {problem}", file=sys.stderr)
    if problems:
        if len(problems) > SHOWN:
            print(f"relax: … {len(problems) - SHOWN} more", file=sys.stderr)
        return 2
    stored = stored_weights(architecture)
    parameters = sum(math.prod(weight.shape) for weight in stored)
    key = family_key(architecture.family, also=parsed.family)
    assert key is not None, "the folder's architecture was read by it"
    model = f"model={key}" if key in yaml_options("model") else f"model=folder model.family={key}"
    print(f"{folder}: {len(stored):,} weights, {parameters:,} parameters; {model} trains it.")
    return 0


def _tokenizer_problems(folder: Path) -> list[str]:
    try:
        try_tokenizer(folder)
        problem = vocabulary_problem(folder, PromptTokenizer(folder))
    except ValueError as error:
        problem = f"model.path: {error}"
    return [problem] if problem else []


if __name__ == "__main__":
    with unread_streams():
        sys.exit(main())
