"""Sounds: headers, decoding of files and of the tracks of containers, features.

Start reading in `clip_features.py`.
"""
