"""Sends a run's records to W&B, MLflow, ClearML, Prometheus and OpenTelemetry, each from a process of its own.

Start reading in `sink_process.py`, which starts that process; `wandb_sink.py` is a sink.
"""
