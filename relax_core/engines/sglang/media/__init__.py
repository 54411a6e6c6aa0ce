"""Passes media items to SGLang's model; SGLang imports this package as its plug-in of media processors.

Start reading in ``media_processor.py``.
"""
