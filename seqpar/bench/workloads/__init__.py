"""What is measured: lengths, heads and masks, and who is measured, our strategies and their
alternatives.

Start with `workloads.py`.
"""
