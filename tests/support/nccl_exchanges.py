"""Exchanges under NCCL's rules: when they start and stop, and what delays them."""

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Speeds:
    """The speeds of computing and of messages.

    A message arrives after the latency and a transfer at the rate. The transfer has all bytes that
    the exchange of its sender sends, or all bytes that the exchange of its receiver receives,
    whichever are more. Exchanges share no links.
    """

    area: float = 0.0  # seconds in forward for a unit of area (see `Hooks`)
    backward: float = 2.5  # how many times as long backward takes
    latency: float = 0.0  # seconds
    rate: float = math.inf  # bytes a second


@dataclasses.dataclass(eq=False)
class Message:
    """A message, and the exchanges of its sender and its receiver once they are posted."""

    sender: "Posted | None" = None
    receiver: "Posted | None" = None

    def arrival(self, speeds):
        """Return when the message arrives, or None if the time is not known yet."""
        both = self.sender, self.receiver
        if any(x is None or x.start is None for x in both):
            return None
        seconds = speeds.latency + max(self.sender.sent, self.receiver.received) / speeds.rate
        return max(x.start for x in both) + seconds


class Posted:
    """An exchange that one rank has posted. `start` and `stop` are None until they are known."""

    def __init__(self, rank, exchange, posted, previous, sends, recvs):
        self.rank, self.exchange, self.posted, self.previous = rank, exchange, posted, previous
        self.sent, self.received = (sum(x.nbytes for _, x in part) for part in (sends, recvs))
        self.messages, self.peers, self.start, self.stop = [], [], None, None

    def settle(self, speeds):
        """Find out `start` and `stop`, if possible; return whether one of them has changed."""
        before = self.start, self.stop
        if self.start is None and (self.previous is None or self.previous.stop is not None):
            self.start = max(self.posted, self.previous.stop if self.previous else 0.0)
        arrivals = [message.arrival(speeds) for message in self.messages]
        if None not in arrivals:
            self.stop = max(arrivals)
        return before != (self.start, self.stop)

    def why(self):
        """Say why this exchange has not ended."""
        if self.start is None:
            return f"{self.exchange}, behind {self.previous.why()}"
        reasons = []
        for message, peer in zip(self.messages, self.peers, strict=True):
            sends = message.sender is self
            other = message.receiver if sends else message.sender
            if other is None:
                reasons.append(f"rank {peer} has not posted the {'receive' if sends else 'send'}")
            elif other.start is None:
                reasons.append(f"rank {peer} has it behind {other.previous.exchange}")
        return f"{self.exchange} ({'; '.join(dict.fromkeys(reasons))})"
