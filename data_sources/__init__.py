"""Holds data sources, one file each. Every file defines a ``SPEC`` that the registry finds by the file's name."""
