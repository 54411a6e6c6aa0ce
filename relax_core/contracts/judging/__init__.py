"""The contract between rewards and judges, the models that give verdicts on answers.

Start reading in `judge.py`.
"""
