"""What each strategy should send: arithmetic on the numbers of tokens, ranks, heads and
dims alone.

FORMULAS has an entry a strategy; a new strategy adds its own. `test_scale.py` holds the strategies
to them.
"""

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
    """Of a setting, each as (forward, backward): bytes and messages that are sent."""

    sent: Callable[[Setting], tuple[int, int]]
    messages: Callable[[Setting], tuple[int, int]]


def moved_keys(sent, received, of_one_call=0):
    """Bytes: bf16 keys and values go one way in both passes, and in backward their gradients the
    other way: in fp32, or in bf16 if one kernel call returned them, as on a GPU."""
    return 2 * sent, 2 * sent + 4 * received - 2 * of_one_call


def head_groups(s):
    """In how many groups heads travel: one for each 4,096 rows of a rank."""
    return max(1, min(s.kv_heads, s.local // 4096))


def one_a_peer(s):
    """Of each group of heads, keys and values to each rank that sees them; in backward their
    gradients to each owner."""
    groups = head_groups(s)
    return groups * s.targets, groups * (s.targets + s.sources)


def single_sources(s):
    """How many other ranks' keys arrive alone in an exchange of AllGather: in the first and in the
    last one."""
    return len({1, s.ranks - 1} & {*range(1, s.sources + 1)})


# Ring and AllGather, in other steps.
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
    """Tokens for heads in a row of I ranks: each has 1/I of the query heads and of the KV heads, or
    one of these if there are fewer, in two groups if there are two. `group` is one group's
    attention, in which all rows take part.

    KV heads are cut too, or come with the first group and leave with the last. Their gradients are
    fp32 on the way (4 bytes) if several ranks have the same.
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
        """Of each head its owner needs all tokens: (I − 1)/I of q, out, dout and dq travel, keys to
        each that needs them."""
        queries, keys = (
            self.s.local * (self.row - 1) * n * (self.s.dim + self.s.value_dim) for n in self.heads
        )
        return 2 * queries + 2 * keys, 2 * queries + self.contribution * keys

    def messages(self):
        """To each peer, of each group, q with k and v, and out; or dout, and dq with dk and dv, or
        beside them where they are sums."""
        sums = self.groups[1] if self.contribution == 4 else 0
        forward, backward = 2 * self.groups[0], 2 * self.groups[0] + sums
        return forward * (self.row - 1), backward * (self.row - 1)


def both(x, y):
    return tuple(a + b for a, b in zip(x, y, strict=True))


def exchange_formulas(ring, row):
    """Heads within rows of `row(setting)` ranks and, for each group of them, the formulas of `ring`
    between the rows."""

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
    """Bytes of a rank's visiting rows (q; q, dout, lse and delta) and of their results (out and
    fp32 lse; dq). Elements of out and dq have this size: 2 if one kernel call returned them."""
    visitors = s.rows * 2 * s.dim, s.rows * (2 * (s.dim + s.value_dim) + 8)
    return visitors, (s.rows * (size * s.value_dim + 4), s.rows * size * s.dim)


def token_ring_moved(visits, results):
    """Rows visit the ranks whose keys they see, and results leave for the ranks whose rows see the
    keys here."""
    return lambda s: tuple(
        v * visits(s) + r * results(s) for v, r in zip(*token_ring_blocks(s, 2), strict=True)
    )


def token_ring_messages(s):
    """Tensors are messages of their own where they are sent without a copy: of all heads."""
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (s.sources + s.targets), queries * s.sources + groups * s.targets


def mesh_shape(s):
    """Rows and columns of the mesh that tests put ranks on: powers of two, about square."""
    columns = 1 << s.ranks.bit_length() // 2
    return s.ranks // columns, columns


def mesh_counts(s):
    """How many other ranks a rank's queries visit, and how many visit it; to how many it sends
    keys, and from how many it has them. With causal, queries see keys of a column whose first rank
    is before theirs, and keys are seen by rows behind their own."""
    rows, columns = mesh_shape(s)
    row, column = divmod(s.rank, columns)
    if s.full:
        return columns - 1, columns - 1, rows - 1, rows - 1
    visits = columns - 1 if row else column
    return visits, columns - 1 if row else columns - 1 - column, rows - 1 - row, row


def mesh_sent(s):
    visits, guests, to, sources = mesh_counts(s)
    (query, row), (result, dq) = token_ring_blocks(s, 4)  # over the keys of several ranks
    forward = query * visits + result * guests + 2 * s.keys * to
    return forward, row * visits + dq * guests + s.keys * (2 * to + 4 * sources)


def mesh_messages(s):
    visits, guests, to, sources = mesh_counts(s)
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (visits + guests) + to, queries * visits + groups * guests + to + sources


def half_moved(s):
    """Bytes of a plan in which the second half of each rank's queries goes to the next rank."""
    half = s.rows // 2
    sources, targets = half_moved_keys(s)
    forward = half * (2 * s.dim + 4 * s.value_dim + 4)
    backward = half * (2 * (s.dim + s.value_dim) + 8 + 4 * s.dim)
    return half, sources, targets, forward, backward


def half_moved_keys(s):
    """From how many ranks a rank has keys, and to how many it sends them. With causal those behind
    it need them, and rank 0, to which the last rank's queries go."""
    if s.full:
        return s.ranks - 1, s.ranks - 1
    return s.rank or s.ranks - 1, s.ranks - 1 - s.rank + (s.rank > 0)


def tasks_sent(s):
    _, sources, targets, forward, backward = half_moved(s)
    return forward + 2 * s.keys * targets, backward + s.keys * (2 * targets + 4 * sources)


def tasks_messages(s):
    """Queries, in backward beside their statistics; results; keys, and their gradients. In backward
    heads travel in groups."""
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
