"""Says how much the towers of a model compute for an item, in rows of its language model. Imports no torch.

The work of a prompt is the number of its rows, each of which counts 1, and the work of its items. It is counted in
multiplications of matrix products, forward: a backward pass has twice as many of both kinds.
"""

from __future__ import annotations

from collections.abc import Sequence

from relax_core.contracts.media import MediaItem
from relax_core.families.architecture import Architecture, AudioTower, VisionTower

_COLOURS = 3
_KERNEL = 9  # a convolution of an audio tower sees 3 x 3 values


def item_work(architecture: Architecture, item: MediaItem) -> float:
    """Returns the work of the towers for an image, a video, a sound, or a video with its sound, in rows.

    The features that they give are rows of the language model too, which are not counted here.
    """
    products = 0
    if architecture.vision is not None:
        products += vision_products(architecture.vision, item.grid)
    if architecture.audio is not None:
        products += audio_products(architecture.audio, item.audio_frames)
    return products / row_products(architecture)


def vision_products(tower: VisionTower, grid: Sequence[int]) -> int:
    """Returns the multiplications of a vision tower for an item whose grid is (time, height, width) in patches.

    The patches of one step of time attend to each other. Each merger maps the patches of a row to one row.
    """
    time, height, width = grid
    frame, hidden = height * width, tower.hidden_size
    embedding = _COLOURS * tower.temporal_patch_size * tower.patch_size**2 * hidden
    block = 4 * hidden**2 + 2 * hidden * tower.intermediate_size + 2 * frame * hidden
    merged = hidden * tower.merge_size**2
    mergers = (1 + tower.deepstack_layers) * merged * (merged + tower.config["out_hidden_size"])
    return time * frame * (embedding + tower.num_layers * block) + time * frame // tower.merge_size**2 * mergers


def audio_products(tower: AudioTower, frames: int) -> int:
    """Returns the multiplications of an audio tower for a sound of ``frames`` frames of features.

    Three convolutions halve bins and frames of each chunk, of which the last is padded to its full length. The rows of
    one window attend to each other.
    """
    chunks, rows, hidden = -(-frames // tower.chunk_frames), tower.rows_of_frames(frames), tower.hidden_size
    channels, bins, length = tower.config["downsample_hidden_size"], tower.mel_bins, tower.chunk_frames
    of_chunk, inputs = 0, 1
    for _ in range(3):
        bins, length = (bins + 1) // 2, (length + 1) // 2
        of_chunk += bins * length * channels * inputs * _KERNEL
        inputs = channels
    of_chunk += length * channels * bins * hidden
    layer = 4 * hidden**2 + 2 * hidden * tower.intermediate_size
    of_row = tower.num_layers * layer + hidden * (hidden + tower.config["output_dim"])
    window = tower.config["n_window_infer"] // tower.chunk_frames * tower.rows_of_frames(tower.chunk_frames)
    windows, rest = divmod(rows, window)
    scores = tower.num_layers * 2 * hidden * (windows * window**2 + rest**2)
    return chunks * of_chunk + rows * of_row + scores


def row_products(architecture: Architecture) -> int:
    """Returns the multiplications of one row in the layers of the language model.

    Of the experts those count that a row is routed to. The scores of attention, which depend on the rows before, and
    the output layer, which no row of a prompt needs, do not count.
    """
    one, experts, net = architecture, architecture.experts, architecture.delta_net
    heads = one.num_heads * (3 if one.output_gate else 2) + 2 * one.num_kv_heads
    products = len(one.attention_layers) * one.hidden_size * one.head_dim * heads
    if net is not None:
        inputs = net.channels + net.values + 2 * net.value_heads
        state = 3 * net.value_heads * net.key_dim * net.value_dim  # what is read, what is written, and the output
        mixing = one.hidden_size * (inputs + net.values) + net.kernel * net.channels + state
        products += len(one.delta_layers) * mixing
    width = one.intermediate_size
    if experts is not None:
        width = experts.per_token * experts.width + experts.shared_width
        products += one.num_layers * one.hidden_size * (experts.count + bool(experts.shared_width))
    return products + one.num_layers * 3 * one.hidden_size * width
