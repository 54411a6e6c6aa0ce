"""Executes a run on this machine, in a Slurm job or on a Ray cluster. Also executes the runs of a sweep.

Start reading in `local.py`: every launcher calls it on the machine that executes the run.
"""
