"""Benchmarks of plans: how close they are to the bound, and how long planning takes."""
