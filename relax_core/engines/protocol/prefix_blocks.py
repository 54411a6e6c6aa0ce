"""Hashes the beginnings of a prompt in whole blocks, so that two prompts with a common beginning are found quickly."""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.media import Media


def prefix_blocks(input_ids: Sequence[int], media: Sequence[Media] = (), *, block: int) -> list[int]:
    """Returns one hash for each whole block of ``block`` tokens; it covers all tokens up to the block's end.

    It covers the digests of the images, videos and sounds of these rows too, because different ones may have equal ids.
    """
    blocks: list[int] = []
    before = 0
    for start in range(0, len(input_ids) - block + 1, block):
        end = start + block
        items = [one.item.digest for one in media if one.start < end and one.end > start]
        before = hash((before, *input_ids[start:end], *items))
        blocks.append(before)
    return blocks
