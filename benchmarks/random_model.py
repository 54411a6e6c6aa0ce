"""Makes a Qwen3 of given sizes with random weights and the built-in tokenizer, for runs that depend on sizes only.

python -m benchmarks.random_model FOLDER HIDDEN FEED_FORWARD LAYERS HEADS KV_HEADS HEAD_DIM VOCABULARY
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path


def main() -> None:
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from relax_core.families.tiny_configs import MAX_POSITIONS
    from relax_core.tools.tiny_text import write_tiny_tokenizer

    folder = Path(sys.argv[1])
    hidden, feed_forward, layers, heads, kv_heads, head_dim, vocabulary = map(int, sys.argv[2:])
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        pad_token_id=0,
        eos_token_id=3,
    )
    model = Qwen3ForCausalLM(config)
    # An answer ends at random after about VOCABULARY tokens, because all other logits are random around 0, the logit of
    # the end token.
    model.model.embed_tokens.weight.data[config.eos_token_id] = 0.0
    model.save_pretrained(folder)
    write_tiny_tokenizer(folder)


if __name__ == "__main__":
    main()
