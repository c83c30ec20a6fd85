"""A scheduler for Megatron's hybrid context parallelism, which follows `balance.plan`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from seqpar.balance.planning.planner import plan
from seqpar.core.arguments import Ints, as_int
from seqpar.costs.cluster import Cluster
from seqpar.costs.costs import Costs
from seqpar.costs.model import Model
from seqpar.layout.layout import Layout


class PlanScheduler:
    """Assigns samples to ranks in Megatron's hybrid context parallelism, by `balance.plan`.

    Assign the scheduler to `cp_balancing_scheduler` of a `HybridCPDataLoaderWrapper`; it has the
    methods of Megatron's `BalancedCPScheduler`. Megatron has process groups only for aligned blocks
    of ranks whose size is a power of two, and for all ranks. Each sample is computed by the
    smallest of these groups that contains the ranks that the plan chose for the sample. All ranks
    of a group compute their shared samples in the same order.

    Args:
        max_seq_len_per_rank: the config's `max_seqlen_per_dp_cp_rank`, which limits how many tokens
            of a sample a rank holds.
        dp_cp_group: Megatron's group of the ranks of data and context parallelism.
        cluster: the devices and links of these ranks, or a preset; as in `balance.plan`.
        model: the model, or a preset; as in `balance.plan`.
        method: as in `balance.plan`. The default, "power_of_two", plans with Megatron's groups.

    Raises:
        ValueError: if an argument is wrong, or the cluster does not have the group's ranks.
    """

    def __init__(
        self,
        max_seq_len_per_rank: int,
        dp_cp_group: Any,
        *,
        cluster: Cluster | str,
        model: Model | str,
        method: str = "power_of_two",
    ) -> None:
        self.capacity = as_int("max_seq_len_per_rank", max_seq_len_per_rank, 1)
        self.ranks, self.method = int(dp_cp_group.size()), method
        costs = Costs(cluster, model)
        self.cluster, self.model = costs.cluster, costs.model
        if self.cluster.ranks != self.ranks:
            expected = f"the {self.ranks} ranks of dp_cp_group"
            raise ValueError(f"cluster must have {expected}, got {self.cluster.ranks}")

    def get_groups_and_subsamples(
        self, sample_id_seqlens: Sequence[tuple[int, int]], config: Any = None
    ) -> tuple[list[list[list[int]]], list[list[list[int]]]]:
        """Return the lengths and the ids of each rank's samples, in the order of computation.

        Both results have the form that Megatron expects: a list of steps, in which each step has a
        list for each rank. Megatron has a barrier after each step. Here there is only one step.
        Ranks that share samples compute them in the same order and therefore need no barrier.

        Args:
            sample_id_seqlens: the id and the number of tokens of each sample. Megatron requires
                that the number of tokens is a multiple of twice the number of ranks.
            config: ignored.

        Raises:
            ValueError: if there is no sample, or a length is wrong.
        """
        if not sample_id_seqlens:
            raise ValueError("sample_id_seqlens must have a sample, got none")
        ids, lengths = (np.array(x, np.int64) for x in zip(*sample_id_seqlens, strict=True))
        if (wrong := (lengths <= 0) | (lengths % (2 * self.ranks) != 0)).any():
            i = int(np.argmax(wrong))
            expected = f"multiples of {2 * self.ranks} tokens"
            found = f"{lengths[i]} of sample {ids[i]}"
            raise ValueError(f"sample_id_seqlens must have {expected}, got {found}")
        planned = plan(
            lengths, self.cluster, self.model, capacity=self.capacity, method=self.method
        )
        of_ranks: list[list[int]] = [[] for _ in range(self.ranks)]
        for batch in planned.micro_batches:
            blocks = self._blocks(batch.layout, batch.documents)
            for first, size, sample in sorted(blocks, key=lambda x: (-x[1], x[0])):
                for rank in range(first, first + size):
                    of_ranks[rank].append(sample)
        if not all(of_ranks):  # Megatron needs a sample on every rank, so all share one
            longest = int(np.argmax(lengths))
            of_ranks = [[longest, *(x for x in own if x != longest)] for own in of_ranks]
        groups = [[lengths[own].tolist() for own in of_ranks]]
        return groups, [[ids[own].tolist() for own in of_ranks]]

    def _blocks(self, layout: Layout, documents: Ints) -> Iterator[tuple[int, int, int]]:
        low, high = np.full(documents.size, self.ranks), np.zeros(documents.size, np.int64)
        for rank in range(self.ranks):
            held = np.unique([span.document for span in layout.spans(rank)]).astype(np.int64)
            low[held], high[held] = np.minimum(low[held], rank), rank
        for sample, start, stop in zip(*(x.tolist() for x in (documents, low, high)), strict=True):
            yield *self._block(start, stop), sample

    def _block(self, start: int, stop: int) -> tuple[int, int]:
        size = 1
        while start // size != stop // size:
            size *= 2
        first = start // size * size
        if 2 * size > self.ranks or first + size > self.ranks:
            return 0, self.ranks
        return first, size
