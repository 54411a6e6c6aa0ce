"""Passes media items to SGLang's model. SGLang imports this package as a plug-in with media processors.

Start reading in ``media_processor.py``.
"""
