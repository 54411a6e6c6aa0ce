"""Plays episodes of several turns with an environment, and builds a group's token tree from its responses.

Start reading in `group_assembly.py`, which makes complete groups; `episode_player.py` plays environments of several
turns.
"""
