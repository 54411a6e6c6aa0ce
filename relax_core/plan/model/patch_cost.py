"""Computes what a patch of an image or video costs in a vision tower that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class PatchCost:
    """Says how many numbers a vision tower of ``depth`` blocks keeps of one patch for its backward pass.

    ``block`` is what each block keeps, ``rest`` what all else does, and ``hidden`` the width of a patch. ``a_row``
    patches become one row of the language model.
    """

    depth: int
    hidden: int
    block: int
    rest: int
    a_row: int

    def values(self, *, recomputed: bool) -> int:
        """Returns the numbers of a patch; with ``recomputed`` only the inputs of blocks are kept, and one block."""
        return (self.depth * self.hidden + self.block if recomputed else self.depth * self.block) + self.rest


def patch_cost(values: Mapping[str, Any]) -> PatchCost:
    """Counts what Qwen3-VL's vision tower keeps of a patch for its backward pass.

    A block keeps two norms with input and output, the projections before and after rotation, the attention's output and
    the two widths of its MLP. A merger keeps its norm's input and output, and three widths for the patches of one row.
    """
    hidden, wide, merge = values["hidden_size"], values["intermediate_size"], values["spatial_merge_size"] ** 2
    mergers = 1 + len(values.get("deepstack_visual_indexes") or ())
    patch = values["in_channels"] * values["temporal_patch_size"] * values["patch_size"] ** 2
    merger = 2 * hidden + 3 * hidden + values["out_hidden_size"] // merge
    return PatchCost(
        depth=values["depth"],
        hidden=hidden,
        block=10 * hidden + 2 * wide,
        rest=patch + hidden + mergers * merger,
        a_row=merge,
    )
