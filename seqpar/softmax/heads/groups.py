"""The heads that each rank computes if tokens are exchanged for heads, and their groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise


@dataclass(frozen=True)
class HeadGroup:
    """Heads of one rank that are computed together: query heads `q`, and their KV heads `kv`.

    All of the KV heads have the same number of the query heads.
    """

    q: slice
    kv: slice
    first: bool  # whether it is the first of the rank's groups with these KV heads
    last: bool  # whether it is the last of them

    @property
    def q_count(self) -> int:
        return self.q.stop - self.q.start

    @property
    def kv_count(self) -> int:
        return self.kv.stop - self.kv.start

    @property
    def arriving_kv(self) -> slice:
        """The KV heads that arrive with this group; none if an earlier group brought them."""
        return self.kv if self.first else slice(0, 0)

    @property
    def leaving_kv(self) -> slice:
        """The KV heads whose gradients are complete after this group and can be sent back."""
        return self.kv if self.last else slice(0, 0)


class HeadGroups:
    """The heads of all ranks, in groups.

    Rank r of P gets query heads ⌊rHq/P⌋ … ⌊(r+1)Hq/P⌋ − 1, and the KV heads that they use. With
    `whole_on_ranks`, KV heads are divided in this way instead, each with all of its query heads.

    Each rank's heads are cut into `groups` groups, or fewer if it has fewer heads. Cuts are between
    KV heads if possible; with `whole_kv` all of them are. There are more groups if that is needed
    to give all KV heads of a group the same number of query heads.

    Attributes:
        count: how many groups the rank with the most groups has.
        kv_on_several_ranks: whether some KV head goes to several ranks.
    """

    def __init__(
        self,
        ranks: int,
        q_heads: int,
        kv_heads: int,
        groups: int,
        whole_kv: bool,
        whole_on_ranks: bool = False,
    ) -> None:
        self._group_size = q_heads // kv_heads  # query heads per KV head
        self._whole_kv = whole_kv
        unit = self._group_size if whole_on_ranks else 1  # query heads that stay together
        edges = [rank * (q_heads // unit) // ranks * unit for rank in range(ranks + 1)]
        cuts = [self._cut(start, stop, groups) for start, stop in pairwise(edges)]
        self.count = max(map(len, cuts)) - 1
        padded = [cut + cut[-1:] * (self.count + 1 - len(cut)) for cut in cuts]
        self._ranks = [self._groups(cut) for cut in padded]
        sent = (group.arriving_kv for rank in self._ranks for group in rank)
        self.kv_on_several_ranks = sum(kv.stop - kv.start for kv in sent) > kv_heads

    def group(self, number: int) -> list[HeadGroup]:
        """Return each rank's group of this number; it is empty if the rank has fewer groups."""
        return [rank[number] for rank in self._ranks]

    def of_rank(self, rank: int) -> list[HeadGroup]:
        return self._ranks[rank]

    def _cut(self, start: int, stop: int, groups: int) -> list[int]:
        """Return the edges of the groups of query heads start … stop − 1."""
        size = self._group_size
        # Query heads whose KV heads have all of their query heads in this range.
        whole_start = min(stop, -(-start // size) * size)
        whole_stop = max(start, stop // size * size)
        cuts = sorted({start, whole_start, whole_stop, stop}) if stop > start else [start, stop]
        while len(cuts) <= groups:
            widest, widest_start = max((b - a, a) for a, b in pairwise(cuts))
            if widest < 2 or (self._whole_kv and widest <= size):
                break
            unit = size if widest > size else 1
            cuts = sorted([*cuts, widest_start + widest // unit // 2 * unit])
        return cuts

    def _groups(self, cuts: list[int]) -> list[HeadGroup]:
        groups: list[HeadGroup] = []
        for start, stop in pairwise(cuts):
            kv_start = start // self._group_size
            kv = slice(kv_start, -(-stop // self._group_size) if stop > start else kv_start)
            continued = bool(groups) and (stop == start or kv == groups[-1].kv)
            if groups and kv == groups[-1].kv:
                groups[-1] = replace(groups[-1], last=False)
            groups.append(HeadGroup(slice(start, stop), kv, first=not continued, last=True))
        return groups


divide_heads = cache(HeadGroups)
