"""Draw one strategy on a batch and a cluster as a page whose address contains all its options.

`question.py` has the options, `answer.py` simulates them, `drawing.py` and `page.py` show the
result, and `server.py` serves pages. Start with `answer.py`.
"""
