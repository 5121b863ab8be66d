"""Compiled things kept on disk, by content.

store.py     Store(folder): get, put, show, trim, export, import; what keys are made of; whole programs by
             the content of their graphs
"""
