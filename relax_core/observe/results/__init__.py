"""Makes the results of a run that has ended: summary.json, findings about its numbers, and the plot of its curves.

Start reading in `summary.py`.
"""
