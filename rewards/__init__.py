"""Holds rewards, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `reverse_digits.py`; math.py shows a reward that runs in its own process, mix.py one that is made of
others. Sub-folders hold rewards of one kind with what they share.
"""
