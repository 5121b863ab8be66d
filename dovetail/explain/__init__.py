"""Tell people what happened: reads events, imports no stage.

query.py  events -> Explanation      text.py  Explanation -> text
stats.py  events -> dict             html.py  Explanation -> one self-contained page
"""
