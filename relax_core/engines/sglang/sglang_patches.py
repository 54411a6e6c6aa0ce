"""Patches SGLang's modules right after their import, in each process of a server that the run starts."""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from relax_core.contracts.engine import KV_CACHE
from relax_core.engines.sglang.media.placed_items import FRACTION_UNITS, VISION_FOLDER, WHOLE_BITS
from relax_core.families.architecture import Architecture


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Calls ``change`` with the module ``name`` as soon as this process has loaded the module."""
    sys.meta_path.insert(0, _AfterImport(name, change))


class _AfterImport(MetaPathFinder):
    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        assert spec is not None and spec.loader is not None, f"there is no {fullname}"
        load = spec.loader.exec_module

        def load_and_change(module: ModuleType) -> None:
            load(module)
            self._change(module)

        spec.loader.exec_module = load_and_change  # type: ignore[method-assign]
        return spec


ATTENTION = "torch_native"
CPU_FLAGS = (  # the user's flags follow these flags and override them
    *("--device", "cpu"),
    *("--attention-backend", ATTENTION),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # otherwise SGLang's waiting scheduler uses a whole core
)
_kept: list[object] = []  # torch removes the schemas of a library object when the object is garbage-collected


def install_on_cpu() -> None:
    """Installs the patches for a CPU. Call it in each process of the server before sglang is imported."""
    if importlib.util.find_spec("sgl_kernel") is None:
        sys.path.append(str(Path(__file__).with_name("cpu")))
    after_import("torchvision.extension", _define_missing_schemas)
    after_import("sglang.srt.mem_cache.pool_host.common", _pin_no_memory)
    after_import("sglang.srt.arg_groups.choices", _allow_seeds)
    after_import("sglang.srt.batch_invariant_ops", _keep_torch_kernels)
    after_import("sglang.kernels.ops.attention.fla.layernorm_gated", _norm_on_cpu)
    after_import("sglang.srt.models.qwen2_moe", _add_shared_expert_on_cpu)


def _define_missing_schemas(module: ModuleType) -> None:
    """Defines torchvision's operators nms and qnms, if torchvision's compiled library has not defined them.

    torchvision registers fake kernels for these operators. ``module`` is torchvision.extension; its import loads the
    library. PyPI's build of the library requires a CUDA build of torch. The check is needed because a second definition
    ends the process without an exception.
    """
    import torch

    library = torch.library.Library("torchvision", "FRAGMENT")
    for operator in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, operator):
            library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


def _pin_no_memory(module: ModuleType) -> None:
    """Removes the CUDA call that pins host memory for return_routed_experts."""
    module._cuda_host_register = lambda *arguments, **keywords: None  # type: ignore[attr-defined]


def _allow_seeds(module: ModuleType) -> None:
    """Allows the CPU attention backend with --enable-deterministic-inference, which seeds require."""
    module.add_deterministic_attention_backend_choices([ATTENTION])
    module.add_radix_supported_deterministic_attention_backend_choices([ATTENTION])


def _keep_torch_kernels(module: ModuleType) -> None:
    """Keeps torch's kernels, because SGLang's batch-invariant kernels need Triton.

    On a CPU, torch's kernels may round differently in different batches.
    """
    module.enable_batch_invariant_mode = lambda *arguments, **keywords: None  # type: ignore[attr-defined]


def _norm_on_cpu(module: ModuleType) -> None:
    """Makes the norm of a gated delta net call the CPU kernel. On a CPU without AMX, SGLang calls a Triton kernel."""
    module._use_cpu = True  # type: ignore[attr-defined]


def _add_shared_expert_on_cpu(module: ModuleType) -> None:
    """Replaces the Triton kernel that adds the output of Qwen3.5-MoE's shared expert, times its gate."""

    def added(hidden: Any, gate_weight: Any, shared_output: Any, output: Any) -> None:
        output.add_((hidden @ gate_weight).sigmoid()[:, None] * shared_output)

    module.fused_gate_sigmoid_mul_add = added  # type: ignore[attr-defined]


def install_media() -> None:
    """Installs the patches for media items. Call it before sglang is imported."""
    after_import("sglang.srt.models.qwen3_vl", _take_frames)
    after_import("sglang.srt.models.qwen3_vl_moe", _count_deepstack)
    after_import("sglang.srt.models.qwen3_omni_moe", _pass_whole_chunks)
    after_import("sglang.srt.layers.rotary_embedding.mrope", _rotate_by_fractions)


def forget_features() -> None:
    """Clears SGLang's cache of tower features, because its keys do not contain the weight version."""
    schedule = sys.modules.get("sglang.srt.managers.mm_schedule")
    if schedule is not None and schedule.embedding_cache is not None:
        schedule.embedding_cache.clear()


def _take_frames(module: ModuleType) -> None:
    """Converts the uint8 frames of items to patches, right before the model concatenates the items' tensors."""
    materialize = module.Qwen3VLForConditionalGeneration._materialize_visual_items

    def of_frames(model: Any, items: Sequence[Any], indices: Iterable[int], *more: Any, **named: Any) -> Any:
        chosen = list(indices)
        made = [_with_patches(items[index], model.visual.device) for index in chosen]
        return materialize(model, made, range(len(made)), *more, **named)

    module.Qwen3VLForConditionalGeneration._materialize_visual_items = of_frames


def _count_deepstack(module: ModuleType) -> None:
    """Makes Qwen3-VL-MoE use the number of deepstack outputs in config.json. SGLang assumes three."""
    make = module.Qwen3VLMoeForConditionalGeneration.__init__

    def counted(model: Any, *arguments: Any, **keywords: Any) -> None:
        make(model, *arguments, **keywords)
        model.model.deepstack_embed_to_decoder_layer = range(model.num_deepstack_embeddings)

    module.Qwen3VLMoeForConditionalGeneration.__init__ = counted


def _pass_whole_chunks(module: ModuleType) -> None:
    """Makes the features of a sound equal to the trainer's. The tower pads chunks to the longest chunk of a batch.

    Each sound passes together with a full chunk of silence. The silence's output rows are discarded.
    """
    import torch

    def of_sounds(model: Any, items: Sequence[Any]) -> Any:
        tower, settings = model.audio_tower, _model().audio
        assert settings is not None, "the model has an audio tower"
        like, chunk = next(tower.parameters()), settings.chunk_frames
        rows = []
        for item in items:
            sound = item.feature[0].to(device=like.device, dtype=like.dtype)
            both = torch.cat([sound, sound.new_zeros(len(sound), chunk)], dim=1)
            lengths = torch.tensor([sound.shape[1], chunk], device=like.device)
            own = settings.rows_of_frames(sound.shape[1])
            found = tower(both, feature_lens=lengths).last_hidden_state
            rows.append(found.reshape(-1, found.shape[-1])[:own])
        return torch.cat(rows)

    module.Qwen3OmniMoeThinkerForConditionalGeneration.get_audio_feature = of_sounds


def _rotate_by_fractions(module: ModuleType) -> None:
    """Makes Qwen3-Omni's rotary embedding read packed positions (`packed_positions`). Its videos have fractions.

    SGLang reads cosines and sines from a table with a row for each whole position; this computes them.
    """
    if VISION_FOLDER not in os.environ or _model().audio is None:
        return
    import torch

    class Rotations:
        def __init__(self, frequencies: Any) -> None:
            self._frequencies = frequencies

        def __getitem__(self, packed: Any) -> Any:
            parts = (packed >> WHOLE_BITS).double() / FRACTION_UNITS
            positions = ((packed & (2**WHOLE_BITS - 1)).double() + parts).float()
            angles = positions[..., None] * self._frequencies.to(packed.device)
            return torch.cat([angles.cos(), angles.sin()], dim=-1)

    table_lookup = module.MRotaryEmbedding.forward_native
    names = ("mrope_section", "mrope_interleaved", "head_size", "rotary_dim", "is_neox_style")

    def rotate(rotary: Any, positions: Any, query: Any, key: Any, fused_set_kv_buffer_arg: Any = None) -> Any:
        values = {name: getattr(rotary, name) for name in names}
        computed = SimpleNamespace(cos_sin_cache=Rotations(rotary._compute_inv_freq(rotary.base)), **values)
        return table_lookup(computed, positions, query, key, fused_set_kv_buffer_arg)

    for name in ("forward_native", "forward_cpu", "forward_cuda"):
        setattr(module.MRotaryEmbedding, name, rotate)


def _with_patches(item: Any, device: Any) -> Any:
    """Returns a copy of the item with patches in place of uint8 frames.

    The original item keeps its frames, because SGLang needs them again after it retracts a request.
    """
    import torch

    from relax_core.families.tower_passes import patches_of

    if item.feature.dtype != torch.uint8:
        return item
    tower = _model().vision
    assert tower is not None, "the server is started with this variable only for a model with a tower"
    made = copy.copy(item)
    made.feature = patches_of(item.feature.cpu().numpy(), tower, device=device)
    return made


@cache
def _model() -> Architecture:
    from relax_core.families.folder import folder_architecture

    return folder_architecture(Path(os.environ[VISION_FOLDER]))


def install() -> None:
    """Installs the patches that every server needs. Call it before sglang is imported."""
    after_import("sglang.srt.utils.weight_versions", _record_old_prefixes)
    after_import("sglang.srt.managers.scheduler", _stay_paused_without_cache)
    after_import("sglang.srt.configs.qwen3_5", _read_rotary_part)
    install_media()


def _record_old_prefixes(module: ModuleType) -> None:
    """Adds an empty first version span to a request if older weights have computed a part of its prompt.

    Between two chunks of its prefill, a request has KV cache of the old weights but no token of the old version. The
    client detects the empty span and requests the sample again. SGLang calls this function at every change of the
    version, so the function also clears the cached features of images and videos.
    """
    record = module.record_weight_version_events

    def with_old_prefixes(reqs: Iterable[Any], old_version: str) -> int:
        forget_features()
        requests = list(reqs)
        for request in requests:
            if request.already_computed and not request.output_ids:
                event = module.WeightVersionEvent(old_version=old_version, num_output_tokens=0)
                request.weight_version_events.append(event)
        recorded: int = record(requests, old_version=old_version)
        return recorded

    module.record_weight_version_events = with_old_prefixes  # type: ignore[attr-defined]


def _stay_paused_without_cache(module: ModuleType) -> None:
    """Keeps the server paused while the memory of its KV cache is released.

    A weight update resumes the server at its end, even if another client has released the memory since.
    """
    resume = module.Scheduler.continue_generation

    def unless_released(scheduler: Any, request: Any) -> None:
        if KV_CACHE not in scheduler.weight_updater.offload_tags:
            resume(scheduler, request)

    module.Scheduler.continue_generation = unless_released


def _read_rotary_part(module: ModuleType) -> None:
    """Reads the rotary part of Qwen3.5's heads from rope_parameters, where transformers writes it.

    SGLang ignores this value and rotates a quarter of each head.
    """
    make = module.Qwen3_5TextConfig.__init__

    def with_part(config: Any, **values: Any) -> None:
        part = (values.get("rope_parameters") or {}).get("partial_rotary_factor")
        make(config, **({} if part is None else {"partial_rotary_factor": part}) | values)

    module.Qwen3_5TextConfig.__init__ = with_part
