"""Asks and tells the kernel of this host: waits of a thread for a core, locked files, folders of this user alone.

All folders of the code may use it. Start reading in `private_folder.py`.
"""
