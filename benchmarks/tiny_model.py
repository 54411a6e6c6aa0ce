"""What the engine's benchmarks share: the demo-size model and an engine's settings."""

from __future__ import annotations

from typing import Any

import torch

from relax_core.config.schema import EngineConfig

VOCAB = 50
PROMPT_TOKENS = 16


def demo_model(*, hidden: int = 64, layers: int = 2, inter: int = 192, vocab: int = VOCAB) -> Any:
    """A random Qwen3; by default the size of the demo task's, 102k parameters."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=inter,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
        eos_token_id=3,
        pad_token_id=0,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config).float().eval()


def engine_config() -> EngineConfig:
    return EngineConfig(
        name="embedded",
        count=1,
        host="127.0.0.1",
        port=0,
        max_running_samples=256,
        max_total_tokens=65536,
        context_length=256,
        threads=1,
        start_timeout_s=60.0,
        request_timeout_s=120.0,
        sync_timeout_s=60.0,
    )
