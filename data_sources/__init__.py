"""Holds data sources, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name.

Start reading in `reasoning_gym.py`; files and generated tasks are read by relax_core/data.
"""
