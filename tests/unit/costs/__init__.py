"""Tests of descriptions and costs."""
