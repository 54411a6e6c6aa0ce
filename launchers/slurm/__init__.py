"""Executes runs in Slurm: one job starts one Ray cluster on its nodes, for one run (launcher=slurm).

Start reading in `sbatch.py`, which submits the job; each node executes `node_task.py`.
"""
