"""Sends the event log of a run to files, W&B, MLflow, ClearML, Prometheus and OpenTelemetry. Child processes do this.

Start reading in `tracker_process.py`, which follows the log; `wandb_sink.py` is an example of a sink.
"""
