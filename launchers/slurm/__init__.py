"""launcher=slurm: one Slurm job starts one Ray cluster on its nodes, which executes one run.

Start reading in `sbatch.py`, which submits the job; `node_task.py` is what each node executes.
"""
