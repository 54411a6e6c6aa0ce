"""Starts real engine processes over a tiny random model, as the engine's contract suite does."""

from tests.contracts.engine.conftest import launch, model_folder, sglang_launch, start_engine

__all__ = ["launch", "model_folder", "sglang_launch", "start_engine"]
