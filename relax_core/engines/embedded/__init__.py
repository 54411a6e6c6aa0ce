"""The embedded engine: one process that decodes batches on a CPU and serves SGLang's HTTP protocol on loopback.

Start reading in ``assembly.py``, which builds the engine. ``application.py`` routes requests, ``scheduler.py`` runs the
decode thread, and ``decoder_model.py`` computes the model.
"""
