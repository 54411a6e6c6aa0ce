"""Runs the embedded engine with slow decode steps. So a test finds partly generated samples on every machine.

python -m tests.engines.slow_engine [flags of relax_core.engines.embedded]
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np

from relax_core.engines.embedded import __main__ as embedded
from relax_core.engines.engine_process import EngineLaunch

STEP_S = 0.02


@dataclass(frozen=True, kw_only=True)
class SlowLaunch(EngineLaunch):
    """Launches the slow engine in place of the embedded engine."""

    def command(self) -> list[str]:
        return [__name__ if word == "relax_core.engines.embedded" else word for word in super().command()]


def main() -> int:
    from relax_core.engines.embedded.decoder import Decoder

    step = Decoder.step

    def slow_step(decoder: Decoder) -> np.ndarray:
        time.sleep(STEP_S)
        return step(decoder)

    Decoder.step = slow_step  # type: ignore[method-assign]
    return embedded.main()


if __name__ == "__main__":
    sys.exit(main())
