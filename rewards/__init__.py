"""Holds rewards, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `reverse_digits.py`. math.py is a reward that runs in its own process, and mix.py combines other
rewards. Sub-folders hold rewards of one kind with their shared code.
"""
