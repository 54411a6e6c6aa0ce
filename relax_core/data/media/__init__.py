"""Decodes and encodes images, videos and sounds under limits, in worker processes that can be killed.

Start reading in `encode_pool.py`; `item_encoder.py` encodes one item, and `source_files.py` checks and opens source
files.
"""
