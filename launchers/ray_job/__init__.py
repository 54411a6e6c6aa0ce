"""Executes runs on a Ray cluster through Ray's job API, or writes a manifest for KubeRay (launcher=ray_job).

Start reading in `job_client.py`.
"""
