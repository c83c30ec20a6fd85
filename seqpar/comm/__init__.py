"""Send tensors between ranks. No other package imports torch.distributed.

Start with `messages/comm.py`, which posts messages and waits for them. If a message does not
arrive, `faults/` finds the rank at fault. `routing/` distributes messages over the network cards of
a node.
"""
