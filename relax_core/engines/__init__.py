"""Holds the rollout engines: the embedded CPU engine, SGLang's server, their protocol, and the pool of engines.

Start reading in ``protocol/engine_client.py`` for the calls to an engine, in ``engine_process.py`` for its start.
"""
