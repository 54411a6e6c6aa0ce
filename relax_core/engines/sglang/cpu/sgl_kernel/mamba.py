"""Has the kernels that SGLang imports from this module."""

from relax_core.engines.sglang.cpu.delta_net_kernels import (
    causal_conv1d_fn_cpu,
    causal_conv1d_update_cpu,
    chunk_gated_delta_rule_cpu,
)

__all__ = ["causal_conv1d_fn_cpu", "causal_conv1d_update_cpu", "chunk_gated_delta_rule_cpu"]
