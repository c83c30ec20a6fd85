"""Areas of queries over keys, cut with one another: the arithmetic of masks as lists of ranges."""

from __future__ import annotations

from typing import NamedTuple

from seqpar.core.ranges import UNLIMITED


class Area(NamedTuple):
    """Queries over keys of a row of tokens under a band, as `seqpar.Mask.of_ranges` has them."""

    q_start: int
    q_stop: int
    k_start: int
    k_stop: int
    low: int = -UNLIMITED
    high: int = UNLIMITED

    def meets(self, other: Area) -> list[Area]:
        """Return what both have: one area, or none."""
        found = Area(
            max(self.q_start, other.q_start),
            min(self.q_stop, other.q_stop),
            max(self.k_start, other.k_start),
            min(self.k_stop, other.k_stop),
            max(self.low, other.low),
            min(self.high, other.high),
        )
        return found.trimmed()

    def trimmed(self) -> list[Area]:
        """Return it without queries that see nothing and keys that nobody sees, if it has any."""
        q0, q1, k0, k1, low, high = self
        if q0 >= q1 or k0 >= k1 or low > high:
            return []
        q0, q1 = max(q0, k0 - high), min(q1, k1 - low)
        k0, k1 = max(k0, q0 + low), min(k1, q1 + high)
        return [Area(q0, q1, k0, k1, low, high)] if q0 < q1 and k0 < k1 else []

    def without(self, other: Area) -> list[Area]:
        """Return what another area does not have, as disjoint areas."""
        common = self.meets(other)
        if not common:
            return [self]
        q0, q1 = common[0].q_start, common[0].q_stop
        k0, k1 = max(self.k_start, other.k_start), min(self.k_stop, other.k_stop)
        rest = [
            self._replace(q_stop=q0),
            self._replace(q_start=q1),
            self._replace(q_start=q0, q_stop=q1, k_stop=k0),
            self._replace(q_start=q0, q_stop=q1, k_start=k1),
            Area(q0, q1, k0, k1, self.low, min(self.high, other.low - 1)),
            Area(q0, q1, k0, k1, max(self.low, other.high + 1), self.high),
        ]
        return [area for some in rest for area in some.trimmed()]

    def moved(self, queries: int, keys: int) -> Area:
        """Return it with so many added to its queries' and its keys' positions."""
        q0, q1, k0, k1, low, high = self
        by = keys - queries
        return Area(q0 + queries, q1 + queries, k0 + keys, k1 + keys, low + by, high + by)
