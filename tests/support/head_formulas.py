"""What strategies that exchange tokens for heads should send, receive and hold."""

import dataclasses

from tests.support.key_formulas import Formulas, Setting, ring_computes, running


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
