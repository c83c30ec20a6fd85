"""What strategies whose keys travel should send, receive and hold; and what all formulas are of."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Setting:
    """N tokens laid out contiguously on P ranks, in bf16; `full` or causal, as rank r sees it."""

    rank: int
    ranks: int
    tokens: int
    heads: int
    kv_heads: int
    full: bool = True
    window: int = -1
    dim: int = 128
    value_dim: int = 64

    @property
    def local(self):
        return self.tokens // self.ranks

    @property
    def rows(self):
        """A rank's query rows, times heads."""
        return self.local * self.heads

    @property
    def keys(self):
        """Elements in a rank's own keys and values."""
        return self.local * self.kv_heads * (self.dim + self.value_dim)

    @property
    def sources(self):
        """How many other ranks' keys this rank's queries see: with causal, those of all ranks
        before it."""
        return self.ranks - 1 if self.full else self.rank

    @property
    def targets(self):
        """How many other ranks' queries see this rank's keys: with causal, all rows of all ranks
        behind it."""
        return self.ranks - 1 if self.full else self.ranks - 1 - self.rank


@dataclasses.dataclass(frozen=True)
class Formulas:
    """Of a setting, each as (forward, backward): bytes sent and received, messages sent, and a
    bound on bytes held at once beside the inputs (of forward q, k, v; of backward what forward
    kept, and dout)."""

    sent: Callable[[Setting], tuple[int, int]]
    received: Callable[[Setting], tuple[int, int]]
    messages: Callable[[Setting], tuple[int, int]]
    held: Callable[[Setting], tuple[int, int]]


def moved_keys(sent, received):
    """Bytes: bf16 keys and values go one way in both passes, and in backward their fp32 gradients
    the other way."""
    return 2 * sent, 2 * sent + 4 * received


def head_groups(s):
    """In how many groups heads travel: one for each 4,096 rows of a rank."""
    return max(1, min(s.kv_heads, s.local // 4096))


def running(s):
    """Bytes of forward's partial (fp32 out, fp64 lse) and of the result (bf16 out, fp32 lse)."""
    return s.rows * (4 * s.value_dim + 8), s.rows * (2 * s.value_dim + 4)


def own_gradients(s):
    """Bytes of fp32 dq, dk and dv of a rank's tokens, and of lse with its rows that see nothing
    replaced."""
    return 4 * (s.rows * s.dim + s.keys) + 4 * s.rows


def keys_computed(s, steps, ahead):
    """Forward's and backward's bytes while a rank computes, where keys of so many ranks at a time
    travel in each of the `steps`, those of the next `ahead` steps during the compute.

    Forward, of a group of heads: the partial, and the step's keys, those that arrive, and packed
    those that are sent; or at the end its result. From the second group on, room for all results.
    Backward: those keys and this rank's gradients, and the gradients of the step's keys, and the
    contributions of the step before, leaving and coming, or then those of the step, coming.
    """
    groups, results = head_groups(s), running(s)[1]
    s = dataclasses.replace(s, heads=s.heads // groups, kv_heads=s.kv_heads // groups)
    partial, own, distance = running(s)[0], own_gradients(s) * groups, 1
    here, away = [0], [0]  # how many ranks' keys arrive in each step, and how many ranks get these
    for count in steps:
        step = range(distance, distance := distance + count)
        here.append(sum(s.full or t <= s.rank for t in step))
        away.append(sum(s.full or t < s.ranks - s.rank for t in step))
    moments = []
    for now in range(len(here) + 1):
        under_way = slice(now + 1, now + 1 + ahead)
        computed = sum(here[now : now + 1])
        keys = 2 * s.keys * (computed + sum(here[under_way]) + any(away[under_way]))
        before = here[now - 1] + away[now - 1] if now else 0
        returning = max(before, sum(away[now : now + 1]))
        moments.append((partial + keys, own + keys + 4 * s.keys * (computed + returning)))
    forward, backward = map(max, zip(*moments, strict=True))
    return max(forward, sum(running(s))) + results * (groups > 1), backward


def keys_held(s, steps, ahead):
    """What it computes with; or at the end of backward the gradients, and dq as it is cast."""
    forward, backward = keys_computed(s, steps, ahead)
    return forward, max(backward, own_gradients(s) - 4 * s.rows + 2 * s.rows * s.dim)


def ring_computes(s):
    return keys_computed(s, [1] * (s.ranks - 1), 1)


def ring_held(s):
    return keys_held(s, [1] * (s.ranks - 1), 1)


def all_gather_held(s):
    """In exchanges with 1, 2, 4, … ranks, then one more than half of all, and …, 4, 2, 1: for
    powers of two."""
    rising = [2**i for i in range(s.ranks.bit_length() - 2)]
    steps = [*rising[:-1], rising[-1] + 1, *reversed(rising)]
    assert sum(steps) == s.ranks - 1
    return keys_held(s, steps, s.ranks)


def one_a_peer(s):
    """Of each group of heads, keys and values to each rank that sees them; in backward their
    gradients to each owner."""
    groups = head_groups(s)
    return groups * s.targets, groups * (s.targets + s.sources)


def key_formulas(held):
    return Formulas(
        sent=lambda s: moved_keys(s.keys * s.targets, s.keys * s.sources),
        received=lambda s: moved_keys(s.keys * s.sources, s.keys * s.targets),
        messages=one_a_peer,
        held=held,
    )


RING = key_formulas(ring_held)
