"""SGLang's HTTP protocol as Relax uses it: the client, reply formats, scores, stop strings, weight calls.

Start reading in ``engine_client.py``.
"""
