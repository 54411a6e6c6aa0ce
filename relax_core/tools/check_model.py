"""`python -m relax_core.tools.check_model FOLDER`: can the trainer load this Hugging Face folder?

It reads config.json and the headers of the weights, no tensor: seconds for a model of any size. There is nothing to
convert: a run reads the folder itself, each rank its own slices.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from pathlib import Path

from relax_core.train.models.check_folder import tensor_shape, weight_problems
from relax_core.train.models.family import read_hf_config
from relax_core.train.models.registry import FAMILIES, check_model_type

SHOWN = 20  # problems; a wrong folder has thousands


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 where the folder cannot be loaded, with the problems on stderr."""
    parser = argparse.ArgumentParser(prog="python -m relax_core.tools.check_model", description=__doc__)
    parser.add_argument("folder", type=Path, help="a Hugging Face model folder")
    folder = parser.parse_args(arguments).folder
    try:
        hf_config = read_hf_config(folder)
        of_type = [each for each in FAMILIES.values() if each.hf_model_type == hf_config.get("model_type")]
        family = of_type[0] if of_type else next(iter(FAMILIES.values()))
        check_model_type(family, hf_config, model_folder=folder)
        family.transformer_arguments(hf_config)
        problems = weight_problems(folder, family, hf_config)
    except ValueError as error:
        problems = [str(error)]
    for problem in problems[:SHOWN]:
        print(f"relax: {problem}", file=sys.stderr)
    if problems:
        if len(problems) > SHOWN:
            print(f"relax: … {len(problems) - SHOWN} more", file=sys.stderr)
        return 2
    rules = family.weights(hf_config)
    parameters = sum(math.prod(tensor_shape(rule, family, hf_config)) for rule in rules)
    print(f"{folder}: {len(rules):,} weights, {parameters:,} parameters; model.family={family.name} trains it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
