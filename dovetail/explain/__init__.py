"""Tell people what happened: reads events, imports no stage.

query.py  events -> Explanation, or a dict of numbers
text.py   Explanation -> text, or one self-contained page
"""
