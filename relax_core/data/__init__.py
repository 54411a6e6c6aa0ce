"""Prompt sources with a resumable cursor, evaluation sets, and the tokenizer with its chat template.

Start reading in `sources.py`; `tokenizer.py` turns conversations into token ids.
"""
