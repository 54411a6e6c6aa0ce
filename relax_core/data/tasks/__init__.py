"""Generated tasks with images, videos and sounds, whose files are made once in the user's cache folder.

Start reading in `see_task.py`; `relax_core.data.generated` has the tasks of text and the entry for all.
"""
