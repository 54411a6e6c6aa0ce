"""Adds this folder to the import path, so that tests share tiny_trainer.py, and registers a simulated device."""

import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

if os.environ.get("RELAX_TRAIN_DEVICE") == "simulated":  # before a test reads this process's device
    from tests.simulated_device.simgpu import register

    register()
