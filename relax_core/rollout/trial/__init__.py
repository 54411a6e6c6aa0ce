"""Tries the plug-ins of a run before the run starts, in a child process that is killed if a plug-in hangs.

Start reading in `plugin_trial.py`.
"""
