"""Computes what a patch of an image or video costs in a vision tower: memory of a training rank, and products."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from relax_core.config.choices import PROJECTOR, VISION
from relax_core.families.towers import vision_products


@dataclass(frozen=True, kw_only=True)
class PatchCost:
    """Says how many numbers a vision tower of ``depth`` blocks keeps of one patch for its backward pass.

    ``block`` is what each block keeps, ``mergers`` what the projector keeps, ``inputs`` the pixels and their embedding,
    and ``hidden`` the width of a patch. ``a_row`` patches become one row of the language model, whose features and
    deepstack rows are ``features`` numbers. ``products`` counts the multiplications of one patch, of the scores only
    those among the patches of its row. ``pixel_bytes`` are the bytes of a patch's uint8 pixels in one frame.
    """

    depth: int
    hidden: int
    block: int
    mergers: int
    inputs: int
    a_row: int
    features: int
    products: int
    pixel_bytes: int

    def values(self, *, recomputed: bool, frozen: Collection[str] = ()) -> int:
        """Returns the numbers of a patch that are kept; with ``recomputed`` only the inputs of blocks, and one block.

        Blocks keep nothing if the tower is ``frozen``, and mergers keep nothing if the projector is frozen, too.
        """
        if VISION in frozen:
            return 0 if PROJECTOR in frozen else self.mergers
        blocks = self.depth * self.hidden + self.block if recomputed else self.depth * self.block
        return blocks + self.mergers + self.inputs


def patch_cost(values: Mapping[str, Any]) -> PatchCost:
    """Counts what Qwen3-VL's vision tower keeps of a patch for its backward pass.

    A block keeps two norms with input and output, the projections before and after rotation, the attention's output and
    the two widths of its MLP. A merger keeps its norm's input and output, and three widths for the patches of one row.
    """
    hidden, wide, merge = values["hidden_size"], values["intermediate_size"], values["spatial_merge_size"] ** 2
    mergers, out = 1 + len(values.get("deepstack_visual_indexes") or ()), values["out_hidden_size"]
    pixels = values["in_channels"] * values["patch_size"] ** 2
    patch = values["temporal_patch_size"] * pixels
    return PatchCost(
        depth=values["depth"],
        hidden=hidden,
        block=10 * hidden + 2 * wide,
        mergers=mergers * (5 * hidden + out // merge),
        inputs=patch + hidden,
        a_row=merge,
        features=mergers * out,
        products=vision_products(values, (1, 1, merge)) // merge,
        pixel_bytes=pixels,
    )
