"""Decodes and encodes images, videos and sounds under limits, in worker processes that can be killed.

Start reading in `encode_pool.py`; `item_encoder.py` makes one item, and `source_files.py` says which files are opened.
"""
