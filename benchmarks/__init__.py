"""Benchmarks, by the question that each folder answers; README.md lists them."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
