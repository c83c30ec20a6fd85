"""Compare simulated steps with measured ones."""
