"""A gang of four ranks that keeps its processes and changes its layout: the layouts, the models, how it starts."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from relax_core.config.schema import ParallelConfig, Recompute

HERE = Path(__file__).parent
RANKS = 4
DENSE_LAYOUTS: dict[str, dict[str, int]] = {
    "dp4": {"dp": 4},
    "tp2_pp2": {"tp": 2, "pp": 2},
    "tp2_cp2": {"tp": 2, "cp": 2},
    "pp2_vpp2_dp2": {"pp": 2, "vpp": 2, "dp": 2},
    "pp4": {"pp": 4},
}
MOE_LAYOUTS: dict[str, dict[str, int]] = {
    "tp2_ep4": {"tp": 2, "dp": 2, "ep": 4},
    "tp2_ep2_etp2": {"tp": 2, "dp": 2, "ep": 2, "etp": 2},
    "pp2_ep2": {"pp": 2, "dp": 2, "ep": 2},
    "tp2_pp2_vpp2_ep2": {"tp": 2, "pp": 2, "vpp": 2, "ep": 2},
}


def parallel_config(**sizes: Any) -> ParallelConfig:
    return ParallelConfig(
        **{
            "name": "test",
            **dict.fromkeys(("dp", "tp", "pp", "vpp", "cp", "ep", "etp"), 1),
            "sequence_parallel": sizes.get("tp", 1) > 1,
            "recompute": Recompute.none,
            "distributed_optimizer": False,
            "overlap": False,
            "micro_batch_tokens": 8192,
            "logprob_chunk_tokens": 1024,
            "threads_per_rank": 1,
            **sizes,
        }
    )


def run_gang(script: str, *arguments: str, timeout_s: float = 120.0) -> list[tuple[int, str]]:
    """Runs ``script`` of this folder as rank 0 to 3: arguments <rank> <port> …; exit status and stderr of each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environment = os.environ | {
        "PYTHONPATH": f"{HERE.parents[1]}:{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(HERE / script), str(rank), str(port), *arguments],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        errors = [process.communicate(timeout=timeout_s)[1] for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    return [(process.returncode, error) for process, error in zip(ranks, errors, strict=True)]


def make_models(folder: Path) -> None:
    """Tiny random models of four layers: untied, tied, moe. Two ranks cannot share their 51 words evenly."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": 51,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "rope_theta": 1000000.0,
    }
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
    for name, tied in (("untied", False), ("tied", True), ("moe", False)):
        torch.manual_seed(0)
        model: Any = (
            Qwen3MoeForCausalLM(Qwen3MoeConfig(**shape, **experts, tie_word_embeddings=tied))
            if name == "moe"
            else Qwen3ForCausalLM(Qwen3Config(**shape, tie_word_embeddings=tied))
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.1)
        model.save_pretrained(folder / name)
