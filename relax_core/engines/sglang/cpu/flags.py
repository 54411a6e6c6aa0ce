"""How SGLang is started where there is no GPU. A user's own flags stand behind these and win."""

from __future__ import annotations

from relax_core.engines.sglang.cpu.shims import ATTENTION

CPU_FLAGS = (
    *("--device", "cpu"),
    *("--attention-backend", ATTENTION),
    *("--sampling-backend", "pytorch"),
    *("--grammar-backend", "none"),
    "--disable-overlap-schedule",
    "--sleep-on-idle",  # else its scheduler takes a whole core while it waits
)
