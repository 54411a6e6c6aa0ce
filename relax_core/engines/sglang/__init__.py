"""SGLang as an engine: a server process that the run starts and monitors, or an external server.

Start reading in ``sglang_client.py`` for requests, and in ``sglang_process.py`` for the process.
"""
