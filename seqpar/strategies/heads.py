"""Heads: which of them each rank computes when tokens are exchanged for heads, and in which groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise


@dataclass(frozen=True)
class HeadGroup:
    """Some heads of one rank, computed together: query heads, and the KV heads of which each has as many of them."""

    q: slice
    kv: slice
    first: bool  # of the rank's groups with these KV heads
    last: bool

    @property
    def kv_count(self) -> int:
        return self.kv.stop - self.kv.start

    @property
    def arriving_kv(self) -> slice:
        """The KV heads that come with this group's query heads."""
        return self.kv if self.first else slice(0, 0)

    @property
    def leaving_kv(self) -> slice:
        """The KV heads whose gradients are complete with this group's."""
        return self.kv if self.last else slice(0, 0)


class Heads:
    """Query heads ⌊rHq/P⌋ … ⌊(r+1)Hq/P⌋ − 1 go to rank r, and the KV heads that they share.

    Each rank's are cut into `groups` groups, if there are so many heads: between KV heads where that is possible, and with
    `whole_kv` only there. A group has as many query heads of each of its KV heads, which may take more groups.
    """

    def __init__(self, ranks: int, q_heads: int, kv_heads: int, groups: int, whole_kv: bool) -> None:
        self._share = q_heads // kv_heads  # query heads a KV head
        self._whole_kv = whole_kv
        cuts = [self._cut(rank * q_heads // ranks, (rank + 1) * q_heads // ranks, groups) for rank in range(ranks)]
        self.groups = max(map(len, cuts)) - 1
        self._ranks = [self._groups(cut + cut[-1:] * (self.groups + 1 - len(cut))) for cut in cuts]
        sent = (group.arriving_kv for rank in self._ranks for group in rank)
        self.shared = sum(kv.stop - kv.start for kv in sent) > kv_heads  # some KV head is on several ranks

    def group(self, number: int) -> list[HeadGroup]:
        """One group of each rank's; a rank that has fewer ends with empty ones."""
        return [rank[number] for rank in self._ranks]

    def of_rank(self, rank: int) -> list[HeadGroup]:
        return self._ranks[rank]

    def _cut(self, start: int, stop: int, groups: int) -> list[int]:
        share = self._share
        first, last = min(stop, -(-start // share) * share), max(start, stop // share * share)
        cuts = sorted({start, first, last, stop}) if stop > start else [start, stop]
        while len(cuts) <= groups:
            size, at = max((b - a, a) for a, b in pairwise(cuts))
            if size < 2 or (self._whole_kv and size <= share):
                break
            unit = share if size > share else 1
            cuts = sorted([*cuts, at + size // unit // 2 * unit])
        return cuts

    def _groups(self, cuts: list[int]) -> list[HeadGroup]:
        groups: list[HeadGroup] = []
        for start, stop in pairwise(cuts):
            kv = slice(start // self._share, -(-stop // self._share) if stop > start else start // self._share)
            continued = bool(groups) and (stop == start or kv == groups[-1].kv)
            if groups and kv == groups[-1].kv:
                groups[-1] = replace(groups[-1], last=False)
            groups.append(HeadGroup(slice(start, stop), kv, first=not continued, last=True))
        return groups


divide_heads = cache(Heads)
