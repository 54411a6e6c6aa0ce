"""Executes runs on a Ray cluster through its job API, or writes a manifest for KubeRay (launcher=ray_job).

Start reading in `job_client.py`.
"""
