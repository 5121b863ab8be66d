"""Decompositions, one file per family: each registers its own when it is imported, which happens here."""

import importlib
import pkgutil

for _family in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_family.name}")
