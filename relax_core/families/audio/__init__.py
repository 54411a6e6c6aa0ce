"""Holds what trainer, engines and encoder share about audio towers: settings, and the rows of a sound.

Start reading in `audio_settings.py`.
"""
