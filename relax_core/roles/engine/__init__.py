"""The owners of the engine processes, and how other roles find the engines.

Start reading in `engine_owner.py`.
"""
