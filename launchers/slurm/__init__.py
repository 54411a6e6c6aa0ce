"""Executes runs in Slurm (launcher=slurm). A job starts one Ray cluster on its nodes, for one run.

Start reading in `sbatch.py`, which submits the job. Each node executes `node_task.py`.
"""
