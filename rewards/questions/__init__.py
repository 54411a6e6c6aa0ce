"""Contains rewards that compare words: choices, short answers, answers about pictures.

Start reading in `multiple_choice.py`.
"""
