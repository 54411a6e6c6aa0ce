"""Uses SGLang as an engine: a server process that the run starts and watches, or a server of somebody else.

Start reading in ``sglang_client.py`` for requests, in ``sglang_process.py`` for the process.
"""
