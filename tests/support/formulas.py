"""What each strategy should send, receive and hold: arithmetic on the numbers of tokens, ranks,
heads and dims alone.

FORMULAS has an entry a strategy; a new strategy adds its own. Of what a rank holds a formula takes
the most of the moments that it names. `test_scale.py` holds the strategies to them.
"""

from tests.support.head_formulas import exchange_formulas
from tests.support.key_formulas import (
    RING,
    Formulas,
    all_gather_held,
    head_groups,
    key_formulas,
    own_gradients,
    running,
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


def token_ring_messages(s):
    """Tensors are messages of their own where they are sent without a copy: of all heads."""
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (s.sources + s.targets), queries * s.sources + groups * s.targets


def token_ring_held(s):
    forward, backward = visiting(s, s.ranks, s.rank, running(s)[0], own_gradients(s))
    return max(forward, sum(running(s))), max(backward, own_gradients(s) * 3 // 2)


def visiting(s, ranks, rank, partial, own):
    """What the rank of this number in a row holds, beside forward's partial or backward's own
    gradients, and with them: of a group of heads the visitors of a visit and of the next, copies of
    those that leave for the next, the results of the visit before, leaving and coming, and either
    those that came before them, while they are merged (in forward with three fp64 lse), or those
    that are computed (from an fp64 lse)."""
    groups = head_groups(s)
    visitors, results = ([x // groups for x in sizes] for sizes in token_ring_blocks(s))
    # Backward's home has delta, too, and the lse and delta that travel.
    home = partial, own + s.rows * (4 + 8)
    full = s.full or s.rank != rank  # behind a mesh's first row, all see some key of each column

    def at(visit, base, visitor, result, merging, computing):
        """Rows of a later rank are here, and rows of this one at an earlier rank, unless all see
        all."""
        steps = [1 + t // groups for t in range(visit - 2, visit + 2)]
        here, away = (
            [0 < t < ranks and (full or t > first) for t in steps]
            for first in (rank, ranks - 1 - rank)
        )
        leaving_and_coming = result * (here[1] + away[1])
        both = max(away[0] * (result + merging), here[2] * (result + computing))
        copies = visitor * away[3] * (groups > 1)
        return base + visitor * (here[2] + here[3]) + copies + leaving_and_coming + both

    temporary = (24 * s.rows // groups, 8 * s.rows // groups), (0, 0)
    passes = zip(home, visitors, results, temporary, strict=True)
    return [
        max(at(visit, *sizes, *extra) for visit in range(-1, (ranks - 1) * groups + 2))
        for *sizes, extra in passes
    ]


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
    (query, row), (result, dq) = token_ring_blocks(s)
    forward = query * visits + result * guests + 2 * s.keys * to
    return forward, row * visits + dq * guests + s.keys * (2 * to + 4 * sources)


def mesh_received(s):
    visits, guests, to, sources = mesh_counts(s)
    (query, row), (result, dq) = token_ring_blocks(s)
    forward = query * guests + result * visits + 2 * s.keys * sources
    return forward, row * guests + dq * visits + s.keys * (2 * sources + 4 * to)


def mesh_messages(s):
    visits, guests, to, sources = mesh_counts(s)
    groups = head_groups(s)
    queries = groups if groups > 1 else 3
    return groups * (visits + guests) + to, queries * visits + groups * guests + to + sources


def mesh_held(s):
    """As TokenRing in its row, with the keys of its column, and their gradients. Before that this
    rank's keys are packed while they leave; in the end gradients leave and come, block by block,
    with the last dq, while blocks of keys go."""
    rows, columns = mesh_shape(s)
    visits, guests, to, sources = mesh_counts(s)
    (query, row), (_, dq) = token_ring_blocks(s)
    keys, gradients = 2 * s.keys * sources, 4 * s.keys * sources
    partial, own = running(s)[0] + keys, own_gradients(s) + keys + gradients
    forward, backward = visiting(s, columns, s.rank % columns, partial, own)
    packed, last = 2 * s.keys * bool(to), (s.full or s.rank % columns == 0 or s.rank >= columns)
    forward = max(forward, partial + packed + query * bool(guests), sum(running(s)))
    steps = range(1, rows)
    moments = [2 * min(t, to) + sources - min(t - 1, sources) for t in steps]
    leaving = own_gradients(s) + 12 * s.rows + gradients + 2 * s.keys * max(moments, default=0)
    leaving += dq * (bool(visits) + last * bool(guests))
    packing = own + 12 * s.rows + packed + row * bool(guests)
    return forward, max(backward, leaving, packing, own_gradients(s) * 3 // 2)


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


def tasks_received(s):
    _, sources, targets, forward, backward = half_moved(s)
    return forward + 2 * s.keys * sources, backward + s.keys * (2 * sources + 4 * targets)


def tasks_messages(s):
    """Queries, in backward beside their statistics; results; keys, and their gradients."""
    sources, targets = half_moved_keys(s)
    return 2 + targets, 3 + targets + sources


def tasks_held(s):
    """The guests and all keys that come; and packed keys while they leave, or later, as they come
    and leave, results and gradients of keys."""
    half, sources, targets, *_ = half_moved(s)
    partial, result = running(s)
    arriving, results = half * 2 * s.dim + 2 * s.keys * sources, half * (4 * s.value_dim + 4)
    forward = max(partial + arriving + max(2 * s.keys, 2 * results), partial + result)
    sent = half * 2 * (s.dim + s.value_dim)
    arriving, home = sent + 8 * half + 2 * s.keys * sources, own_gradients(s) + 4 * s.rows
    leaving = sent + 8 * s.rows + 2 * s.keys
    returning = 2 * half * 4 * s.dim + 4 * s.keys * targets
    return forward, home + arriving + 4 * s.keys * sources + max(leaving, returning)


FORMULAS = {
    "disaggregated": Formulas(
        sent=tasks_sent, received=tasks_received, messages=tasks_messages, held=tasks_held
    ),
    "ring": RING,
    "all_gather": key_formulas(all_gather_held),
    "token_ring": Formulas(
        sent=token_ring_moved(lambda s: s.sources, lambda s: s.targets),
        received=token_ring_moved(lambda s: s.targets, lambda s: s.sources),
        messages=token_ring_messages,
        held=token_ring_held,
    ),
    "mesh": Formulas(
        sent=mesh_sent, received=mesh_received, messages=mesh_messages, held=mesh_held
    ),
    "ulysses": exchange_formulas(RING, lambda s: s.ranks),
    "usp": exchange_formulas(RING, lambda s: 2),
}
