"""Names and shapes of the weights of Qwen3-Omni's audio tower, from its part of config.json. Imports no torch."""

from __future__ import annotations

from relax_core.contracts.family import HfConfig
from relax_core.families.vision.tower_shapes import Shape, linear_shapes, norm_shapes


def qwen3_omni_audio_shapes(config: HfConfig) -> dict[str, Shape]:
    """Returns the shapes of the weights of Qwen3-Omni's audio tower by their names behind the tower's prefix."""
    hidden, wide, channels = config["d_model"], config["encoder_ffn_dim"], config["downsample_hidden_size"]
    bins = config["num_mel_bins"]
    shapes: dict[str, Shape] = {}
    for number in (1, 2, 3):
        shapes[f"conv2d{number}.weight"] = (channels, 1 if number == 1 else channels, 3, 3)
        shapes[f"conv2d{number}.bias"] = (channels,)
        bins = (bins + 1) // 2  # each convolution has a stride of 2
    shapes["conv_out.weight"] = (hidden, channels * bins)
    for index in range(config["encoder_layers"]):
        layer = f"layers.{index}."
        for part in ("k_proj", "v_proj", "q_proj", "out_proj"):
            shapes |= linear_shapes(f"{layer}self_attn.{part}", hidden, hidden)
        shapes |= norm_shapes(f"{layer}self_attn_layer_norm", hidden)
        shapes |= linear_shapes(f"{layer}fc1", hidden, wide)
        shapes |= linear_shapes(f"{layer}fc2", wide, hidden)
        shapes |= norm_shapes(f"{layer}final_layer_norm", hidden)
    shapes |= norm_shapes("ln_post", hidden)
    shapes |= linear_shapes("proj1", hidden, hidden)
    shapes |= linear_shapes("proj2", hidden, config["output_dim"])
    return shapes
