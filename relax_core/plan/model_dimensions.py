"""Reads the dimensions of a run's model from its folder or shape, and computes the memory of its image patches."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from relax_core.config.choices import PROJECTOR, VISION
from relax_core.config.errors import nearest
from relax_core.config.schema import RelaxConfig
from relax_core.contracts.family import DeltaNet, Experts, Family
from relax_core.families.builtin_families import read_architecture
from relax_core.families.folder import family_key
from relax_core.families.hf_config import inner_config, read_hf_config
from relax_core.families.tiny_configs import MODEL_NAMES, tiny_config
from relax_core.families.towers import audio_products, row_products, vision_products
from relax_core.registry import find_family, names
from relax_core.train.parallel_layout import LayoutShape

SHAPES = Path(__file__).parent / "shapes"


def shape_names() -> list[str]:
    """Returns the names of the published models with stored dimensions."""
    return sorted(file.stem for file in SHAPES.glob("*.json"))


def find_dimensions(config: RelaxConfig) -> ModelDimensions:
    """Returns the dimensions of the trained model. Raises ValueError for a model that cannot be planned."""
    model = config.model
    if model.path is not None:
        return folder_dimensions(Path(model.path), family=model.family)
    if model.builtin is not None:
        return builtin_dimensions(model.builtin)
    if model.shape is not None:
        return shape_dimensions(model.shape)
    raise ValueError(
        f"model.path is not set, so the model's dimensions are unknown. Add model.path=<a Hugging Face folder>, or "
        f"model.shape=<one of: {', '.join(shape_names())}>."
    )


def folder_dimensions(folder: Path, *, family: str | None) -> ModelDimensions:
    """Returns the dimensions of a Hugging Face folder. ``family`` is the value of model.family: a name or a file."""
    return read_dimensions(read_hf_config(folder), name=folder.name, family=family)


def builtin_dimensions(name: str) -> ModelDimensions:
    """Returns the dimensions of a built-in model."""
    assert name in MODEL_NAMES, "validated"
    return read_dimensions(tiny_config(name), name=name)


def shape_dimensions(name: str) -> ModelDimensions:
    """Returns the dimensions of a published model. Raises ValueError for an unknown name."""
    if name not in shape_names():
        near = nearest(name, shape_names(), count=1)
        hint = f" Nearest: {near[0]}." if near else ""
        raise ValueError(f"model.shape={name}: no such shape. Shapes: {', '.join(shape_names())}.{hint}")
    return read_dimensions(json.loads((SHAPES / f"{name}.json").read_text(encoding="utf-8")), name=name)


def teacher_dimensions(model: str, *, family: str | None) -> ModelDimensions:
    """Returns the dimensions of a distillation's teacher; ``name`` is a built-in model or a folder."""
    if model in MODEL_NAMES:
        return builtin_dimensions(model)
    return folder_dimensions(Path(model).expanduser().absolute(), family=family)


def layout_shape(model: ModelDimensions) -> LayoutShape:
    """Returns the sizes that a parallel layout must divide."""
    widths = {"hidden units": model.hidden}
    if model.feed_forward:
        widths["feed-forward units"] = model.feed_forward
    return LayoutShape(
        layers=model.layers,
        heads=model.heads,
        kv_heads=model.kv_heads,
        linear_heads=model.delta_net.key_heads if model.delta_net else 0,
        experts=model.experts.count if model.experts else 0,
        expert_width=model.experts.width if model.experts else 0,
        widths=widths,
        deepstack_layers=model.deepstack_layers,
        has_tower=bool(model.towers),
    )


_BLOCK_WIDTHS = 10  # numbers that a block saves outside its MLP, as a multiple of ``hidden``


@dataclass(frozen=True, kw_only=True)
class PatchCost:
    """Holds how many numbers per patch a vision tower of ``depth`` blocks saves for the backward pass.

    Each block saves ``block`` numbers, and the projector saves ``mergers`` numbers. ``inputs`` counts the pixels and
    their embedding, and ``hidden`` is the width of a patch. ``a_row`` patches become one row of the language model,
    with ``features`` numbers in features and deepstack rows. ``products`` counts the multiplications for one patch. Of
    the attention scores, it includes only the scores between patches of the same row. ``pixel_bytes`` are the bytes of
    a patch's uint8 pixels in one frame.
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

    @property
    def wide(self) -> int:
        """Returns the width of a block's MLP."""
        return (self.block - _BLOCK_WIDTHS * self.hidden) // 2

    def values(self, *, recomputed: bool, frozen: Collection[str] = ()) -> int:
        """Returns how many numbers are saved per patch.

        With ``recomputed`` these are the inputs of all blocks, and the numbers of one block.

        Blocks save no numbers if the tower is ``frozen``. Mergers save no numbers if the projector is frozen, too.
        """
        if VISION in frozen:
            return 0 if PROJECTOR in frozen else self.mergers
        blocks = self.depth * self.hidden + self.block if recomputed else self.depth * self.block
        return blocks + self.mergers + self.inputs


def patch_cost(values: Mapping[str, Any]) -> PatchCost:
    """Returns the cost of a patch in Qwen3-VL's vision tower.

    A block saves the input and output of two norms, the projections before and after rotation, the attention's output
    and two tensors of the MLP's width. A merger saves the norm's input and output, and three tensors for the merged
    patches of a row.
    """
    hidden, wide, merge = values["hidden_size"], values["intermediate_size"], values["spatial_merge_size"] ** 2
    mergers, out = 1 + len(values.get("deepstack_visual_indexes") or ()), values["out_hidden_size"]
    pixels = values["in_channels"] * values["patch_size"] ** 2
    patch = values["temporal_patch_size"] * pixels
    return PatchCost(
        depth=values["depth"],
        hidden=hidden,
        block=_BLOCK_WIDTHS * hidden + 2 * wide,
        mergers=mergers * (5 * hidden + out // merge),
        inputs=patch + hidden,
        a_row=merge,
        features=mergers * out,
        products=vision_products(values, (1, 1, merge)) // merge,
        pixel_bytes=pixels,
    )


Values = Mapping[str, Any]
_FLOAT = 4  # bytes
_LONG_SOUND = 3000  # frames of 30 seconds


@dataclass(frozen=True, kw_only=True)
class ModelDimensions:
    """Holds the dimensions of a model.

    ``family`` is config.json's model_type. ``feed_forward`` is the width of a dense layer, 0 with experts.
    The layers ``delta_layer_numbers``, counted from 0, have ``delta_net`` in place of attention. With ``output_gate``
    the query projection also computes a gate with as many numbers as the queries. With ``qkv_bias`` query, key and
    value have a bias; with ``qk_norm`` query and key heads have a norm. Norms are ``zero_centered`` if they multiply by
    1 + their weight. ``rotary`` numbers of a head are rotated. ``towers`` maps a modality to the number of parameters
    of its encoder, including the encoder's projector. ``projector`` is the number of parameters of the vision encoder's
    projector, and ``audio_projector`` the number for the audio encoder's projector.
    ``patches`` is the cost of a patch in a trained vision tower. ``row_products`` counts the multiplications of a row
    (`relax_core.families.towers.row_products`). ``audio_frame_products`` counts the audio tower's multiplications per
    frame, for a sound of 30 seconds.
    """

    name: str
    family: str
    layers: int
    hidden: int
    feed_forward: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    positions: int
    tied_embeddings: bool
    experts: Experts | None = None
    delta_net: DeltaNet | None = None
    delta_layer_numbers: tuple[int, ...] = ()
    output_gate: bool = False
    qkv_bias: bool = False
    qk_norm: bool = True
    zero_centered: bool = False
    rotary: int = 0
    towers: Mapping[str, int] = field(default_factory=dict)
    projector: int = 0
    audio_projector: int = 0
    deepstack_layers: int = 0  # number of first layers that add outputs of the vision tower
    patches: PatchCost | None = None
    row_products: int = 1
    audio_frame_products: int = 0

    @property
    def query(self) -> int:
        """Returns the width of all query heads."""
        return self.heads * self.head_dim

    @property
    def key(self) -> int:
        """Returns the width of all key heads."""
        return self.kv_heads * self.head_dim

    @property
    def delta_layers(self) -> int:
        """Returns the number of layers with a gated delta net."""
        return len(self.delta_layer_numbers)

    @property
    def full_attention_layers(self) -> int:
        """Returns the number of layers with full attention."""
        return self.layers - self.delta_layers

    @property
    def embedding_matrices(self) -> int:
        """Returns 1 for tied embeddings, else 2."""
        return 1 if self.tied_embeddings else 2

    @property
    def embedding_parameters(self) -> int:
        """Returns the number of parameters of the embeddings."""
        return self.embedding_matrices * self.vocabulary * self.hidden

    @property
    def expert_parameters(self) -> int:
        """Returns the number of parameters of all routed experts."""
        return self.layers * self.experts.count * 3 * self.hidden * self.experts.width if self.experts else 0

    @property
    def router_parameters(self) -> int:
        """Returns the number of parameters of all routers; `layer_parameters` includes them."""
        return self.layers * self.hidden * self.experts.count if self.experts else 0

    def tower_work(self, *, patches: float, audio_frames: float) -> float:
        """Returns how many rows of the language model need as many multiplications as the towers need for these inputs.

        Attention scores between patches of different rows are not counted.
        """
        seen = 0 if self.patches is None else patches * self.patches.products
        return (seen + audio_frames * self.audio_frame_products) / self.row_products

    @property
    def tower_parameters(self) -> int:
        """Returns the number of parameters of all encoders."""
        return sum(self.towers.values())

    @property
    def layer_parameters(self) -> int:
        """Returns the number of parameters of all layers and the final norm, without the routed experts."""
        attention = self.full_attention_layers * self._attention_parameters()
        if self.delta_net is not None:
            attention += self.delta_layers * self._delta_net_parameters(self.delta_net)
        return attention + self.layers * (self._dense_parameters() + 2 * self.hidden) + self.hidden

    @property
    def parameters(self) -> int:
        """Returns the number of all parameters."""
        return self.embedding_parameters + self.layer_parameters + self.expert_parameters + self.tower_parameters

    @property
    def cache_values_per_token(self) -> int:
        """Returns how many numbers an engine caches per token: keys and values of the layers with full attention."""
        return 2 * self.full_attention_layers * self.key

    def state_bytes_per_sample(self, size: int) -> int:
        """Returns the bytes of linear attention's states that an engine keeps for one running sample.

        The state matrices are float32; the convolution's inputs have ``size`` bytes per number.
        """
        delta_net = self.delta_net
        if delta_net is None:
            return 0
        convolution = delta_net.channels * (delta_net.kernel - 1)
        return self.delta_layers * (
            delta_net.value_heads * delta_net.key_dim * delta_net.value_dim * _FLOAT + convolution * size
        )

    def state_tokens(self, size: int) -> int:
        """Returns the size of a sample's states in KV-cache tokens; 0 for a model without states."""
        return -(-self.state_bytes_per_sample(size) // (self.cache_values_per_token * size))

    def _attention_parameters(self) -> int:
        projections = self.query * (2 if self.output_gate else 1) + 2 * self.key + self.query
        biases = self.query + 2 * self.key if self.qkv_bias else 0
        return self.hidden * projections + biases + (2 * self.head_dim if self.qk_norm else 0)

    def _delta_net_parameters(self, net: DeltaNet) -> int:
        into = net.channels + net.values + 2 * net.value_heads
        convolution = net.channels * net.kernel
        return self.hidden * (into + net.values) + convolution + 2 * net.value_heads + net.value_dim

    def _dense_parameters(self) -> int:
        if self.experts is None:
            return 3 * self.hidden * self.feed_forward
        shared = self.experts.shared_width
        return self.hidden * self.experts.count + 3 * self.hidden * shared + (self.hidden if shared else 0)


def read_dimensions(values: Values, *, name: str, family: str | None = None) -> ModelDimensions:
    """Returns the dimensions from the content of a config.json.

    ``family``, a name or a file, is tried before the registered families. Raises ValueError for an unknown family, an
    unsupported option or a missing field.
    """
    key = family_key(values.get("model_type"), also=family)
    if key is None:
        known = ", ".join(sorted(names("family")))
        raise ValueError(f"{name}: model_type={values.get('model_type')!r} cannot be planned. Known families: {known}.")
    return _of_a_family_that_trains(values, name, find_family(key))


def _of_a_family_that_trains(values: Values, name: str, family: Family) -> ModelDimensions:
    try:
        architecture = read_architecture(family, values)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    experts, vision, audio = architecture.experts, family.vision, family.audio
    values = inner_config(values)
    towers = {} if vision is None else {"vision": vision_parameters(values[vision.config_key])}
    if audio is not None:
        towers["audio"] = audio_parameters(values[audio.config_key])
    return ModelDimensions(
        name=name,
        family=architecture.family,
        layers=architecture.num_layers,
        hidden=architecture.hidden_size,
        feed_forward=architecture.intermediate_size if experts is None else 0,
        heads=architecture.num_heads,
        kv_heads=architecture.num_kv_heads,
        head_dim=architecture.head_dim,
        vocabulary=architecture.vocab_size,
        positions=architecture.max_positions,
        tied_embeddings=architecture.tie_word_embeddings,
        experts=experts,
        delta_net=architecture.delta_net,
        delta_layer_numbers=architecture.delta_layers,
        output_gate=architecture.output_gate,
        qkv_bias=architecture.qkv_bias,
        qk_norm=architecture.qk_norm,
        zero_centered=architecture.zero_centered,
        rotary=architecture.rotary_dim,
        towers=towers,
        audio_projector=0 if audio is None else audio_projector_parameters(values[audio.config_key]),
        projector=0 if vision is None else projector_parameters(values[vision.config_key]),
        patches=None if vision is None else patch_cost(values[vision.config_key]),
        row_products=row_products(architecture),
        audio_frame_products=0
        if audio is None
        else audio_products(values[audio.config_key], _LONG_SOUND) // _LONG_SOUND,
        deepstack_layers=0 if vision is None else len(values[vision.config_key].get("deepstack_visual_indexes") or ()),
    )


def vision_parameters(values: Values) -> int:
    """Counts the parameters of a Qwen3-VL vision tower: patches, positions, blocks and the projector."""
    hidden, wide = values["hidden_size"], values["intermediate_size"]
    patch = values["in_channels"] * values["temporal_patch_size"] * values["patch_size"] ** 2
    block = 4 * hidden + 4 * hidden * hidden + 4 * hidden + 2 * hidden * wide + wide + hidden
    return int(
        patch * hidden
        + hidden
        + values["num_position_embeddings"] * hidden
        + values["depth"] * block
        + projector_parameters(values)
    )


def projector_parameters(values: Values) -> int:
    """Counts the parameters of a Qwen3-VL tower's mergers.

    The first merger normalizes patches; the deepstack mergers normalize merged patches.
    """
    hidden, out = values["hidden_size"], values["out_hidden_size"]
    merged = hidden * values["spatial_merge_size"] ** 2
    merger = merged * merged + merged + merged * out + out
    deepstack = len(values.get("deepstack_visual_indexes") or ())
    return int(merger + 2 * hidden + deepstack * (merger + 2 * merged))


def audio_parameters(values: Values) -> int:
    """Counts the parameters of a Qwen3-Omni audio tower.

    It has three convolutions that halve the mel bins, encoder layers and two projections.
    """
    hidden, wide, channels = values["d_model"], values["encoder_ffn_dim"], values["downsample_hidden_size"]
    bins = values["num_mel_bins"]
    for _ in range(3):
        bins = (bins + 1) // 2
    convolutions = (9 * channels + channels) + 2 * (9 * channels * channels + channels) + channels * bins * hidden
    layer = 4 * (hidden * hidden + hidden) + 4 * hidden + 2 * hidden * wide + wide + hidden
    return int(convolutions + values["encoder_layers"] * layer + 2 * hidden + audio_projector_parameters(values))


def audio_projector_parameters(values: Values) -> int:
    """Counts the parameters of the two matrices that map a Qwen3-Omni audio tower's rows to the language model."""
    hidden, out = values["d_model"], values["output_dim"]
    return int(hidden * hidden + hidden + hidden * out + out)
