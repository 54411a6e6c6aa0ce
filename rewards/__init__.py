"""Contains rewards, one per file. Every file defines a ``SPEC``. The registry finds it by the file's name.

Start reading in `reverse_digits.py`. math.py is a reward that runs in a separate process, and mix.py combines rewards.
A sub-folder contains rewards of one kind and their shared code.
"""
