"""Holds the embedded engine: one process that decodes batches on a CPU and serves SGLang's HTTP protocol on loopback.

Start reading in ``assembly.py``, which builds the engine from its parts, in ``application.py``, which routes each
request, in ``scheduler.py`` for the decode thread, or in ``decoder_model.py`` for the model.
"""
