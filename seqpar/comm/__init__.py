"""Move tensors between ranks. No other folder imports torch.distributed.

`messages/` posts messages and waits for them, `faults/` finds the rank at fault if one does not
arrive, and `routing/` divides messages among network cards. Start with `messages/comm.py`.
"""
