"""Cut attention into tasks, and assign the tasks to servers with free time.

The method is that of DistCA ("Efficient Long-Context Language Model Training by Core Attention
Disaggregation", 2025). The method runs once per micro-batch, and every rank is also an attention
server. This implementation differs from the paper in three points:

* Overloaded servers give work away until no server has more than (1 + tolerance) times the mean
  work. The paper fills underloaded servers, which can leave too much work on overloaded servers.
* A task can contain only some of the keys to which its queries attend.
* The bytes of a key are counted once for a server, even if several tasks of the server need the
  key. If the server holds the key, no bytes are counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from seqpar.balance.disaggregation.cells import KeyPlacement, cells_of, seconds_of
from seqpar.balance.disaggregation.row_bytes import RowBytes, check_row_bytes
from seqpar.balance.disaggregation.transfers import LIMIT_TOLERANCE, ServerLoads, Terms
from seqpar.core.arguments import Ints, as_float, as_int, as_ranks, as_sequence, check_type, shown
from seqpar.core.compiling import outside_graphs
from seqpar.costs.costs import Costs
from seqpar.costs.grid import Floats
from seqpar.layout.geometry import Geometry
from seqpar.layout.layout import Layout
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.tasks import Parts, TaskRectangles

TILE_ROWS = 128  # query rows that a kernel computes together
MIN_RELATIVE_SPEED = 1e-9  # slower servers, relative to the fastest one, get no work
MAX_NUMBER = 1e18  # largest allowed `tolerance` and `price`
LIMIT_ROUNDS = 4  # rounds in which `_even` corrects the limits of servers


class Stage(NamedTuple):
    """A batch whose attention is computed by servers, for example the batch of one pipeline stage.
    The same servers can compute several of these batches at the same time.

    Attributes:
        layout: which rank owns which queries.
        mask: which keys each query attends to.
        kv_layout: which rank owns which keys, if it differs from `layout`.
        servers: for each rank of the layout, the index of its server. By default rank r is server
            r.
    """

    layout: Layout | Geometry
    mask: Mask
    kv_layout: Layout | Geometry | None = None
    servers: Sequence[int] | None = None


@outside_graphs
def disaggregate(
    layout: Layout | Geometry,
    mask: Mask,
    costs: Costs | None = None,
    *,
    row_bytes: RowBytes,
    kv_layout: Layout | Geometry | None = None,
    tolerance: float = 0.05,
    weights: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    price: float | None = None,
    tile: int = TILE_ROWS,
) -> TaskRectangles:
    """Cut attention into tasks that give all ranks about equal work, and for which few bytes are
    sent.

    A task is a span of query rows and a span of keys of one document, and the rank that computes
    their attention. The result is only a plan: no attention is computed and nothing is sent. The
    same arguments give the same tasks on every rank. Raises a ValueError that names a wrong
    argument.

    Args:
        layout: which rank owns which queries, and needs their results.
        mask: which keys each query attends to.
        costs: predicts the seconds of a task's forward and backward. By default, the cost of a task
            is its number of visible pairs.
        row_bytes: bytes of a row of queries and of keys.
        kv_layout: which rank owns which keys, if it differs from `layout`.
        tolerance: the fraction by which the work of a server can exceed the mean.
        weights: (ranks,) floats. The relative speeds of ranks. A rank with the weight 0 receives no
            work, and gives away as much work as possible.
        memory: one number, or (ranks,). The largest number of bytes of queries, results and keys on
            a server, including rows that the server holds itself. Work stays on its rank if no
            other server has enough memory for it.
        price: the time for sending a byte to a server, in units of work. A server computes the work
            of its own queries while it receives data, so only the time beyond this work counts. By
            default, it is the seconds in which a link sends a byte and returns a byte, or 0 without
            `costs`.
        tile: the number of query rows that a kernel computes together. The number of rows of a task
            is a multiple of `tile`, except for a task at the end of a rank's span of a document.
    """
    return disaggregate_stages(
        [Stage(layout, mask, kv_layout)],
        _geometry("layout", layout).ranks,
        costs,
        row_bytes=row_bytes,
        tolerance=tolerance,
        weights=weights,
        memory=memory,
        price=price,
        tile=tile,
    )[0]


@outside_graphs
def disaggregate_stages(
    stages: Sequence[Stage],
    servers: int,
    costs: Costs | None = None,
    *,
    row_bytes: RowBytes,
    tolerance: float = 0.05,
    weights: ArrayLike | None = None,
    memory: ArrayLike | None = None,
    price: float | None = None,
    tile: int = TILE_ROWS,
) -> list[TaskRectangles]:
    """Return the tasks of each stage, for several stages that run on the same servers at the same
    time. A stage is a batch whose attention the servers compute.

    Work is balanced over all stages together: every server should finish the sum of its tasks of
    all stages at about the same time. Arguments and errors are as in `disaggregate`.
    """
    servers, tile = as_ranks("servers", servers), as_int("tile", tile, 1)
    row_bytes = check_row_bytes(row_bytes)
    if costs is not None and not isinstance(costs, Costs):
        raise ValueError(f"costs must be a Costs or None, got {type(costs).__name__}")
    stages = as_sequence("stages", stages, "Stage")
    for i, stage in enumerate(stages):
        check_type(f"stages[{i}]", stage, Stage)
    if not stages:
        return []
    speeds = _amounts("weights", 1.0 if weights is None else weights, servers)
    if not 0 < speeds.max() < np.inf:
        raise ValueError(f"weights must be finite, and not 0 for all servers, got {shown(weights)}")
    speeds = np.where(speeds < MIN_RELATIVE_SPEED * speeds.max(), 0.0, speeds / speeds.max())
    tolerance = as_float("tolerance", tolerance)
    if not 0 <= tolerance <= MAX_NUMBER:
        limits = f"at least 0, and at most {MAX_NUMBER:.0e}"
        raise ValueError(f"tolerance must be {limits}, got {tolerance}")
    cells, keys, resident, edges = _concatenated(stages, servers, row_bytes)
    room = _amounts("memory", np.inf if memory is None else memory, servers)
    needed = resident + keys.received(servers) * row_bytes.key
    if (needed > room).any():
        i = int(np.argmax(needed - room))
        least = f"{needed[i]:.0f} bytes on server {i}, for its tokens and the keys of its queries"
        raise ValueError(f"memory must be at least {least}, got {room[i]:.0f}")
    exposed = _price(costs) if price is None else as_float("price", price)
    if not 0 <= exposed <= MAX_NUMBER:
        raise ValueError(f"price must be at least 0, and at most {MAX_NUMBER:.0e}, got {exposed}")
    terms = Terms(room - resident, *row_bytes, exposed, tile)
    evened = _even(cells, keys, costs, terms, speeds / speeds.sum(), tolerance)
    order = np.lexsort((evened.k_starts, evened.q_starts, evened.documents, evened.servers))
    evened = evened.take(order)
    number = np.searchsorted(edges, evened.documents, side="right") - 1
    tasks = []
    for i, stage in enumerate(stages):
        own = evened.take(number == i)
        found = TaskRectangles(own.documents - edges[i], *own[1:5], own.servers)
        # Tasks of two ranges of a mask can have the same rectangle of queries and keys, so each
        # task must keep the band of its range.
        if stage.mask.ranges is not None:
            found = found._replace(lows=own.lows, highs=own.highs)
        tasks.append(found)
    return tasks


def _even(
    cells: Parts,
    keys: KeyPlacement,
    costs: Costs | None,
    terms: Terms,
    shares: Floats,
    tolerance: float,
) -> Parts:
    """Move parts of cells between servers until the work of every server is at most (1 + tolerance)
    times the server's share of all work.
    """
    work = seconds_of(cells, costs)
    low = level = (1 + tolerance) * work.sum()
    trust = np.ones(shares.size)
    best, least = cells, np.inf
    # If messages or memory prevent this, bisection finds the lowest limit of work that all servers
    # can meet. After each round, each server's limit is multiplied by the ratio of its planned work
    # to its predicted work.
    for _ in range(LIMIT_ROUNDS):
        limits = level * shares * trust * (1 - min(LIMIT_TOLERANCE, tolerance))
        plan = ServerLoads(cells, work, keys, limits, terms)
        plan.level()
        tasks, ends = plan.cells_now(), plan.ends()
        if costs is not None:
            planned = np.maximum(plan.loads(), 1e-300)
            trust = planned / np.maximum(
                np.bincount(tasks.servers, seconds_of(tasks, costs), shares.size), planned / 2
            )
            ends = ends / trust
        reached = float((ends[shares > 0] / shares[shares > 0]).max())
        if reached < least:
            best, least = tasks, reached
        if reached > level * (1 + LIMIT_TOLERANCE):
            low = level
        elif level == low:
            break
        level = (low + least) / 2
    return best


def _concatenated(
    stages: Sequence[Stage], servers: int, row_bytes: RowBytes
) -> tuple[Parts, KeyPlacement, Floats, Ints]:
    found, spans, edges, resident = [], [], [0], np.zeros(servers)
    for stage in stages:
        queries = _geometry("layout", stage.layout)
        keys = queries if stage.kv_layout is None else _geometry("kv_layout", stage.kv_layout)
        if keys.lengths.size != queries.lengths.size or keys.ranks != queries.ranks:
            expected = f"layout's {queries.lengths.size} documents and {queries.ranks} ranks"
            got = f"{keys.lengths.size} and {keys.ranks}"
            raise ValueError(f"kv_layout must have {expected}, got {got}")
        if not isinstance(stage.mask, Mask):
            raise ValueError(f"mask must be a Mask, got {shown(stage.mask)}")
        stage.mask.check_fits(queries, keys)
        number = np.arange(queries.ranks) if stage.servers is None else np.array(stage.servers)
        fits = number.shape == (queries.ranks,) and np.unique(number).size == number.size
        if not fits or (number.size and not 0 <= number.min() <= number.max() < servers):
            expected = f"{queries.ranks} different numbers below {servers}"
            raise ValueError(f"servers of a stage must be {expected}, got {shown(stage.servers)}")
        cells = cells_of(queries, keys, stage.mask)
        home = [queries.all_spans(), keys.all_spans()]
        for (ranks, _, starts, stops), each in zip(home, row_bytes, strict=True):
            resident += each * np.bincount(number[ranks], stops - starts, servers)
        shift = {"documents": cells.documents + edges[-1], "servers": number[cells.servers]}
        found.append(cells._replace(**shift))
        ranks, documents, starts, stops = home[1]
        spans.append((number[ranks], documents + edges[-1], starts, stops))
        edges.append(edges[-1] + queries.lengths.size)
    joined = Parts(*(np.concatenate(column) for column in zip(*found, strict=True)))
    columns = [np.concatenate(column) for column in zip(*spans, strict=True)]
    return joined, KeyPlacement(joined, columns), resident, np.array(edges)


def _geometry(name: str, layout: object) -> Geometry:
    if isinstance(layout, Layout):
        return layout.geometry
    if isinstance(layout, Geometry):
        return layout
    raise ValueError(f"{name} must be a seqpar.Layout, got {type(layout).__name__}")


def _amounts(name: str, values: ArrayLike, count: int) -> Floats:
    try:
        found = np.array(np.broadcast_to(np.asarray(values, np.float64), count))
    except (TypeError, ValueError):
        expected = f"one number, or one for each of {count} servers"
        raise ValueError(f"{name} must be {expected}, got {shown(values)}") from None
    if not (found >= 0).all():
        raise ValueError(f"{name} must not be negative or NaN, got {shown(values)}")
    return found


def _price(costs: Costs | None) -> float:
    """Return the seconds in which a link between two ranks sends a byte and returns a byte."""
    if costs is None:
        return 0.0
    cluster = costs.cluster
    if cluster.nodes == 1:
        return 2 / cluster.inside.rate
    return 2 * max(1.0, cluster.devices_per_node / cluster.nics) / cluster.between.rate
