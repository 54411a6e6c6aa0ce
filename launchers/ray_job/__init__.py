"""launcher=ray_job: runs on a Ray cluster that exists already, through its job API, or through a manifest for KubeRay.

Start reading in `job_client.py`.
"""
