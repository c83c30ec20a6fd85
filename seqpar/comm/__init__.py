"""Move tensors between ranks: the only folder that imports torch.distributed."""
