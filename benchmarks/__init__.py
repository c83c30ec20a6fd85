"""Benchmarks. Each folder answers one question; README.md lists them."""

from pathlib import Path

RESULTS = Path(__file__).parent / "results"
