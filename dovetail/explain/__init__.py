"""Tell people what happened: reads events, imports no stage.

query.py  events -> Explanation, or a dict of numbers; Explanation -> text, or one self-contained page
views.py  nouns of the compiler, flattened for looking at
"""
