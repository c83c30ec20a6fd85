"""What each strategy should send, receive and hold: arithmetic on the numbers of tokens, ranks,
heads and dims alone.

FORMULAS has an entry a strategy; a new strategy adds its own. Of what a rank holds a formula takes
the most of the moments that it names. `test_scale.py` holds the strategies to them.
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

    Forward: the partial, and the step's keys, those that arrive, and packed those that are sent; or
    at the end the result.
    Backward: those keys and this rank's gradients, and the gradients of the step's keys, and the
    contributions of the step before, leaving and coming, or then those of the step, coming.
    """
    partial, own, distance = running(s)[0], own_gradients(s), 1
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
    return max(forward, sum(running(s))), backward


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
    """Keys and values to each rank that sees them; in backward their gradients to each owner."""
    return s.targets, s.targets + s.sources


def key_formulas(held):
    return Formulas(
        sent=lambda s: moved_keys(s.keys * s.targets, s.keys * s.sources),
        received=lambda s: moved_keys(s.keys * s.sources, s.keys * s.targets),
        messages=one_a_peer,
        held=held,
    )


def token_ring_blocks(s):
    """Bytes of a rank's visiting rows (q; q, dout, lse and delta) and of their results (fp32 out
    and lse; fp32 dq)."""
    visitors = s.rows * 2 * s.dim, s.rows * (2 * (s.dim + s.value_dim) + 8)
    return visitors, (s.rows * (4 * s.value_dim + 4), s.rows * 4 * s.dim)


def token_ring_moved(visits, results):
    """Rows visit the ranks whose keys they see, and results leave for the ranks whose rows see the
    keys here."""
    return lambda s: tuple(
        v * visits(s) + r * results(s) for v, r in zip(*token_ring_blocks(s), strict=True)
    )


def token_ring_groups(s):
    """In how many groups heads travel: one for each 4,096 rows of a rank."""
    return max(1, min(s.kv_heads, s.local // 4096))


def token_ring_messages(s):
    """Tensors are messages of their own where they are sent without a copy: of all heads."""
    groups = token_ring_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (s.sources + s.targets), queries * s.sources + groups * s.targets


def token_ring_held(s):
    """Of a group of heads the visitors of a visit and of the next, copies of those that leave for
    the next, the results of the visit before, leaving and coming, and either those that came before
    them, while they are merged (in forward with three fp64 lse), or those that are computed (from
    an fp64 lse)."""
    groups = token_ring_groups(s)
    visitors, results = ([x // groups for x in sizes] for sizes in token_ring_blocks(s))
    home = (
        running(s)[0],
        own_gradients(s) + s.rows * (4 + 8),
    )  # and delta, and the lse and delta that travel

    def at(visit, base, visitor, result, merging, computing):
        """Rows of a later rank are here, and rows of this one at an earlier rank, unless all see
        all."""
        steps = [1 + t // groups for t in range(visit - 2, visit + 2)]
        here, away = (
            [0 < t < s.ranks and (s.full or t > first) for t in steps]
            for first in (s.rank, s.ranks - 1 - s.rank)
        )
        leaving_and_coming = result * (here[1] + away[1])
        both = max(away[0] * (result + merging), here[2] * (result + computing))
        copies = visitor * away[3] * (groups > 1)
        return base + visitor * (here[2] + here[3]) + copies + leaving_and_coming + both

    temporary = (24 * s.rows // groups, 8 * s.rows // groups), (0, 0)
    passes = zip(home, visitors, results, temporary, strict=True)
    forward, backward = (
        max(at(visit, *sizes, *extra) for visit in range(-1, (s.ranks - 1) * groups + 2))
        for *sizes, extra in passes
    )
    return max(forward, sum(running(s))), max(backward, own_gradients(s) * 3 // 2)


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

    def held(self):
        """What is sent is packed, but for out. What comes back is received before it is put into
        the result, for which there is room from the second group on.

        Forward: all groups' q, k and v, and what the first computes with beside the second's packed
        ones, or the second beside the first's out, lse and those that come home; or in the end all
        out and lse, the result, and a group's that come home.

        Backward: the dout of both groups and what is packed of them; or what a group computes with,
        or its gradients, fp32 and packed, beside the other's dout, packed too, or its gradients,
        leaving (or, fp32, kept) and coming home; or in the end dq, dk and dv, and gradients of a
        group that are packed, and others that come home.
        """
        s, g, c = self.s, self.group, self.contribution
        several, divided = self.groups[0] > 1, self.groups[0] == self.groups[1]
        queries, keys, out = 2 * g.rows * g.dim, 2 * g.keys, 2 * g.rows * g.value_dim
        computing, computing_back = ring_computes(g)
        finished, last = running(g)[1], queries + divided * keys

        buffers = queries + keys + several * last
        begin = 2 * buffers
        first = buffers + several * last + computing
        second = several * (buffers + finished + out + computing)
        end = buffers + self.groups[0] * finished + running(s)[1] + out
        forward = max(begin, first, second, end)
        gradients, sent = 4 * (g.rows * g.dim + g.keys), queries + c // 2 * keys
        first_sent = queries + divided * c // 2 * keys
        kept = (not divided) * 2 * keys
        begin = (2 + 2 * several) * out
        first = 2 * several * out + max(out + computing_back, gradients + first_sent)
        second = 2 * first_sent + max(kept + out + computing_back, gradients + sent)
        end = 2 * s.rows * s.dim + c * s.keys + several * first_sent + sent
        end = max(end, 2 * s.rows * s.dim + c * s.keys + 2 * sent)
        return forward, max(begin, first, several * second, end)


def held_keeping_tokens(s, row, groups):
    """Bytes held by an exchange of heads that keeps tokens, whose groups (1, 2 or more than 3) are
    alike.

    A group is computed while the next arrives, packed too, and what the one before has sent back
    leaves and comes home; beside all results, once there are any. In backward a group brings q, k,
    v, dout, and fp32 lse and delta, for which home has made the latter and a finite lse.
    """
    heads, kv_heads = s.heads // row // groups, s.kv_heads // row // groups
    g = dataclasses.replace(Exchange(s, row).group, heads=heads, kv_heads=kv_heads)
    computing, computing_back = ring_computes(g)

    def most(arriving, computed, leaving, results):
        if groups == 1:
            return max(2 * arriving, computed, results + 2 * leaving)
        if groups == 2:
            two = max(2 * arriving + computed, 2 * leaving + computed)
            return max(4 * arriving, two, results + 2 * leaving)
        return results + 2 * leaving + 2 * arriving + max(2 * arriving, computed)

    operands, finished = 2 * (g.rows * g.dim + g.keys), running(g)[1]
    forward = most(operands, operands + computing, finished, running(s)[1])
    arriving = operands + g.rows * (2 * g.value_dim + 8)
    computed = max(arriving + computing_back - 4 * g.rows, 3 * operands)
    backward = most(arriving, computed, operands, 2 * (s.rows * s.dim + s.keys))
    return forward, 8 * s.rows + backward


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
        received=total("received", Exchange.sent),
        messages=total("messages", Exchange.messages),
        held=lambda s: Exchange(s, row(s)).held(),
    )


RING = key_formulas(ring_held)

FORMULAS = {
    "ring": RING,
    "all_gather": key_formulas(all_gather_held),
    "token_ring": Formulas(
        sent=token_ring_moved(lambda s: s.sources, lambda s: s.targets),
        received=token_ring_moved(lambda s: s.targets, lambda s: s.sources),
        messages=token_ring_messages,
        held=token_ring_held,
    ),
    "ulysses": exchange_formulas(RING, lambda s: s.ranks),
    "usp": exchange_formulas(RING, lambda s: 2),
}
