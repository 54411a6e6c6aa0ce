"""Adds this folder to the import path. So the tests can share tiny_trainer.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
