"""Uses SGLang as an engine: a server process that the run starts and watches, or one that a user runs.

Start reading in ``client/sglang_client.py`` for requests, in ``server/sglang_process.py`` for the process.
"""
