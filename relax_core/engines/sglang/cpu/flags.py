"""Holds the flags that start SGLang without a GPU; the user's own flags come after these and override them."""

from __future__ import annotations

from relax_core.engines.sglang.cpu.shims import ATTENTION

CPU_FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", ATTENTION),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # without it SGLang's scheduler takes a whole core while it waits
)
