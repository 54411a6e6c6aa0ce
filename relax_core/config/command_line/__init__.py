"""Reads the words of the command line, and explains keys and errors to the user.

Start reading in `override_words.py`, which prepares the words for Hydra.
"""
