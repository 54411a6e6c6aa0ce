"""Tests bfloat16 matrix products on a processor without bfloat16 instructions."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.family_models import make_family_model
from relax_core.engines.embedded import half_products
from relax_core.engines.embedded.decoder import ScoreItem, score
from relax_core.engines.embedded.decoder_model import LanguageModel
from relax_core.engines.embedded.fused_weights import FusedWeights, add_product, product
from relax_core.engines.embedded.half_products import HalfMatrix, pack_all
from relax_core.engines.embedded.model_config import read_model_config
from relax_core.weights.folder_stream import read_safetensors

pytestmark = pytest.mark.skipif(
    "fbgemm" not in torch.backends.quantized.supported_engines, reason="FBGEMM is for x86 processors"
)


@torch.inference_mode()
def test_products_are_those_of_the_newest_numbers() -> None:
    torch.manual_seed(0)
    stored, tokens = torch.randn(48, 96).bfloat16(), torch.randn(5, 96)
    matrix, bias = HalfMatrix(stored), torch.randn(48).bfloat16()
    for _ in range(2):
        pack_all([matrix])
        exact = tokens.double() @ stored.double().t()
        torch.testing.assert_close(product(tokens, matrix).double(), exact, atol=1e-4, rtol=0)
        torch.testing.assert_close(add_product(bias, tokens, matrix).double(), exact + bias.double(), atol=1e-4, rtol=0)
        stored.normal_()


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -1e30])
@torch.inference_mode()
def test_numbers_that_float16_cannot_hold_are_not_hidden(odd: float) -> None:
    stored = torch.ones(4, 8).bfloat16()
    stored[1, 2] = odd
    matrix = HalfMatrix(stored)
    matrix.pack()
    torch.testing.assert_close(
        matrix.product(torch.ones(1, 8)), stored.float().sum(1)[None], equal_nan=True, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("variant", ["qwen3_moe", "qwen2, tied"])
@torch.inference_mode()
def test_a_bfloat16_model_gives_what_float32_gives_with_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variant: str
) -> None:
    make_family_model(tmp_path, variant)
    monkeypatch.setattr(half_products.torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    config = read_model_config(tmp_path)
    items = [ScoreItem(token_ids=list(range(4, 44)), start=0, top_k=1, temperature=1.0)]
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        weights = FusedWeights(config, dtype)
        rounded = ((name, tensor.bfloat16()) for name, tensor in read_safetensors(tmp_path))
        weights.apply(weights.checked(rounded))
        assert weights.dtype == torch.float32
        model = LanguageModel(config, weights, context_length=64)
        found.append(torch.tensor(score(model, items, dtype=dtype)[0].logprobs))
    torch.testing.assert_close(found[0], found[1], atol=1e-4, rtol=0)
