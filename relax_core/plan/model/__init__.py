"""Reads the dimensions of a model, from its folder or from a published shape.

Start reading in `dimensions.py`.
"""
