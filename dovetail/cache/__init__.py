"""Compiled things kept on disk, by content.

store.py  Store(folder): get, put, show, trim, export, import
key.py    what a key is made of, so that a miss can be explained
"""
