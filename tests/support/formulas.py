"""Formulas for what each strategy should send, from the numbers of tokens, ranks, heads and dims.

The formulas share no code with the library. FORMULAS has an entry for each strategy, and a new
strategy adds its entry. `test_scale.py` compares what the strategies send with these formulas.
"""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Setting:
    """N tokens, laid out contiguously on P ranks, in bf16, as rank `rank` sees them.

    Attention is `full` or causal.
    """

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
        """The number of the rank's query rows, counted once for each head."""
        return self.local * self.heads

    @property
    def keys(self):
        """The number of elements in the rank's keys and values."""
        return self.local * self.kv_heads * (self.dim + self.value_dim)

    @property
    def sources(self):
        """The number of other ranks whose keys this rank's queries see.

        With causal attention, these are all ranks before this rank.
        """
        return self.ranks - 1 if self.full else self.rank

    @property
    def targets(self):
        """The number of other ranks whose queries see this rank's keys.

        With causal attention, these are all ranks behind this rank.
        """
        return self.ranks - 1 if self.full else self.ranks - 1 - self.rank


@dataclasses.dataclass(frozen=True)
class Formulas:
    """The bytes and the messages that a rank sends in a setting, each as (forward, backward)."""

    sent: Callable[[Setting], tuple[int, int]]
    messages: Callable[[Setting], tuple[int, int]]


def moved_keys(sent, received, of_one_call=0):
    """Return the bytes of a strategy that sends keys and values, and their gradients back.

    Keys and values are sent in bf16 in both passes. In backward, their gradients are sent in fp32.
    Gradients that a single kernel call returned, as on a GPU, are sent in bf16.
    """
    return 2 * sent, 2 * sent + 4 * received - 2 * of_one_call


def head_groups(s):
    """Return the number of groups in which heads are sent: one for each 4,096 tokens of a rank."""
    return max(1, min(s.kv_heads, s.local // 4096))


def one_a_peer(s):
    """Return the messages of a strategy that sends one message per group of heads to each peer.

    In both passes, keys and values go to each rank that sees them. In backward, gradients also go
    to each owner of keys.
    """
    groups = head_groups(s)
    return groups * s.targets, groups * (s.targets + s.sources)


def single_sources(s):
    """Return the number of exchanges of AllGather in which the keys of one other rank arrive alone.

    These are the first exchange and the last exchange.
    """
    return len({1, s.ranks - 1} & {*range(1, s.sources + 1)})


# Ring and AllGather send the same keys, but in different steps.
RING = Formulas(
    sent=lambda s: moved_keys(s.keys * s.targets, s.keys * s.sources, s.keys * s.sources),
    messages=one_a_peer,
)
ALL_GATHER = Formulas(
    sent=lambda s: moved_keys(s.keys * s.targets, s.keys * s.sources, s.keys * single_sources(s)),
    messages=one_a_peer,
)


@dataclasses.dataclass(frozen=True)
class Exchange:
    """An exchange of tokens for heads in a row of I ranks.

    Each rank gets 1/I of the query heads and 1/I of the KV heads, but at least one KV head. If a
    rank has two or more query heads, they are exchanged in two groups, and KV heads likewise.
    `group` is the setting of one group's attention, in which all rows of ranks take part. If there
    is only one group of KV heads, it arrives with the first group of query heads, and its gradients
    leave with the last group. If several ranks have the same KV head, its gradients are sent in
    fp32 (4 bytes).
    """

    s: Setting
    row: int

    @property
    def heads(self):
        q = self.s.heads // self.row
        return q, max(1, q * self.s.kv_heads // self.s.heads)

    @property
    def groups(self):
        return tuple(min(2, count) for count in self.heads)

    @property
    def group(self):
        heads, kv_heads = (
            count // groups for count, groups in zip(self.heads, self.groups, strict=True)
        )
        ranks, rank = self.s.ranks // self.row, self.s.rank // self.row
        return dataclasses.replace(self.s, rank=rank, ranks=ranks, heads=heads, kv_heads=kv_heads)

    @property
    def contribution(self):
        return 4 if self.heads[1] * self.row > self.s.kv_heads else 2

    def sent(self):
        """Return the bytes. The rank that computes a head needs all tokens of this head.

        Each rank sends (I − 1)/I of q, out, dout and dq, and keys to each rank that needs them.
        """
        queries, keys = (
            self.s.local * (self.row - 1) * n * (self.s.dim + self.s.value_dim) for n in self.heads
        )
        return 2 * queries + 2 * keys, 2 * queries + self.contribution * keys

    def messages(self):
        """Return the messages to all peers.

        In forward, each group sends q with k and v, and out. In backward, each group sends dout,
        and dq with dk and dv. If dk and dv are sums over ranks, they are separate messages.
        """
        sums = self.groups[1] if self.contribution == 4 else 0
        forward, backward = 2 * self.groups[0], 2 * self.groups[0] + sums
        return forward * (self.row - 1), backward * (self.row - 1)


def both(x, y):
    return tuple(a + b for a, b in zip(x, y, strict=True))


def exchange_formulas(ring, row):
    """Return the formulas of a strategy that exchanges heads in rows of `row(setting)` ranks.

    Between the rows, each group of heads adds what the formulas `ring` give.
    """

    def total(what, exchanged):
        def formula(s):
            exchange = Exchange(s, row(s))
            between = getattr(ring, what)(exchange.group)
            return both(exchanged(exchange), (exchange.groups[0] * x for x in between))

        return formula

    return Formulas(
        sent=total("sent", Exchange.sent),
        messages=total("messages", Exchange.messages),
    )


def token_ring_blocks(s, size):
    """Return the bytes of a rank's visiting rows, and of their results, each as (forward,
    backward).

    The rows are q in forward, and q, dout, lse and delta in backward. The results are out and lse
    (fp32) in forward, and dq in backward. An element of out and dq has `size` bytes: 2 if one
    kernel call returned it.
    """
    visitors = s.rows * 2 * s.dim, s.rows * (2 * (s.dim + s.value_dim) + 8)
    return visitors, (s.rows * (size * s.value_dim + 4), s.rows * size * s.dim)


def token_ring_moved(visits, results):
    """Return the formula of bytes for rows that visit the ranks whose keys they see.

    Results leave for the ranks whose rows see the keys here.
    """
    return lambda s: tuple(
        v * visits(s) + r * results(s) for v, r in zip(*token_ring_blocks(s, 2), strict=True)
    )


def token_ring_messages(s):
    """Return the messages. Each group of heads is one message to each rank.

    In backward, rows of a single group are sent without a copy, so their tensors are three
    messages.
    """
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (s.sources + s.targets), queries * s.sources + groups * s.targets


def mesh_shape(s):
    """Return (rows, columns) of the mesh in tests, which is about square. Columns are a power of
    two."""
    columns = 1 << s.ranks.bit_length() // 2
    return s.ranks // columns, columns


def mesh_counts(s):
    """Return four numbers of other ranks, in the order in which they are described here.

    They are the ranks that this rank's queries visit, the ranks whose queries visit this rank, the
    ranks to which it sends keys, and the ranks from which it receives keys. With causal attention,
    queries visit a column if its first rank is before theirs, and keys go to the rows behind their
    row.
    """
    rows, columns = mesh_shape(s)
    row, column = divmod(s.rank, columns)
    if s.full:
        return columns - 1, columns - 1, rows - 1, rows - 1
    visits = columns - 1 if row else column
    return visits, columns - 1 if row else columns - 1 - column, rows - 1 - row, row


def mesh_sent(s):
    visits, guests, to, sources = mesh_counts(s)
    (query, row), (result, dq) = token_ring_blocks(
        s, 4
    )  # fp32, since a result is over the keys of several ranks
    forward = query * visits + result * guests + 2 * s.keys * to
    return forward, row * visits + dq * guests + s.keys * (2 * to + 4 * sources)


def mesh_messages(s):
    visits, guests, to, sources = mesh_counts(s)
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (visits + guests) + to, queries * visits + groups * guests + to + sources


def half_moved(s):
    """Return numbers for a plan in which the second half of each rank's queries goes to the next
    rank.

    They are the rows that move, the two results of `half_moved_keys`, and the bytes of the rows and
    their results in forward and in backward.
    """
    half = s.rows // 2
    sources, targets = half_moved_keys(s)
    forward = half * (2 * s.dim + 4 * s.value_dim + 4)
    backward = half * (2 * (s.dim + s.value_dim) + 8 + 4 * s.dim)
    return half, sources, targets, forward, backward


def half_moved_keys(s):
    """Return from how many ranks a rank receives keys, and to how many ranks it sends keys.

    With causal attention, the ranks behind a rank need its keys. Rank 0 needs them too, because the
    queries of the last rank go to rank 0.
    """
    if s.full:
        return s.ranks - 1, s.ranks - 1
    return s.rank or s.ranks - 1, s.ranks - 1 - s.rank + (s.rank > 0)


def tasks_sent(s):
    _, sources, targets, forward, backward = half_moved(s)
    return forward + 2 * s.keys * targets, backward + s.keys * (2 * targets + 4 * sources)


def tasks_messages(s):
    """Return the messages of the plan of `half_moved`.

    In forward, these are queries, results and keys. In backward, they are queries, their
    statistics, results, keys and gradients of keys, once for each group of heads.
    """
    sources, targets = half_moved_keys(s)
    return 2 + targets, head_groups(s) * (3 + targets + sources)


FORMULAS = {
    "disaggregated": Formulas(sent=tasks_sent, messages=tasks_messages),
    "ring": RING,
    "all_gather": ALL_GATHER,
    "token_ring": Formulas(
        sent=token_ring_moved(lambda s: s.sources, lambda s: s.targets),
        messages=token_ring_messages,
    ),
    "mesh": Formulas(sent=mesh_sent, messages=mesh_messages),
    "ulysses": exchange_formulas(RING, lambda s: s.ranks),
    "usp": exchange_formulas(RING, lambda s: 2),
}
