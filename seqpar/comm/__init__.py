"""Move tensors between ranks. No other folder imports torch.distributed.

`messages/` posts messages and waits for them, `faults/` finds the rank at fault if a message does
not arrive, and `routing/` divides messages among network cards. Start with `messages/comm.py`.

A *call* is one call of an attention module or function on all ranks of a group. A *pass* is the
forward or the backward of a call.
"""
