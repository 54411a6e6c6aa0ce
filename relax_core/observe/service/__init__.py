"""Contains the metrics service, a Ray actor that receives the records of all roles and passes them to the sinks.

Start reading in `metrics_service.py`; a role reports through the client in `metrics_actor.py`.
"""
