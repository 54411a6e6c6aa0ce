"""The rollout engines: the embedded CPU engine, SGLang's server, their protocol, and the pool of engines.

Start reading in ``protocol/engine_client.py`` for the calls to an engine, and in ``engine_process.py`` for the start of
an engine.
"""
