"""Draw one strategy on a batch and a cluster: a page that its own address describes."""
