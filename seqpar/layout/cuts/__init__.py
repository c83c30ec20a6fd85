"""How a document is cut into what each rank holds: contiguous, striped, zigzag, even, and in
chunks.

Start with `cuts.py`.
"""
