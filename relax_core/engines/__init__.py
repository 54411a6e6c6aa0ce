"""Holds the rollout engines: the embedded CPU engine, SGLang's server, their protocol, and the pool of engines.

Start reading in ``protocol/engine_client.py`` for what an engine can do, in ``engine_process.py`` for how it starts.
"""
