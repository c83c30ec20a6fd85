"""Divide resources among the jobs that use them at the same time.

A *job* is a computation, a copy or a message. The work of a job is the number of seconds that it
takes without other jobs. A job uses *resources*: a core, the two ends of a link, or NICs. A
resource divides its capacity equally among its jobs, and a job's *share* of a resource is at most
1. A job's *pace* is the smallest of its shares. If a job cannot use its whole share of a resource,
because another of its resources is slower, no other job gets the unused part.

With this rule, a job that starts or ends changes only the paces of jobs on the same resources.
Max-min fairness would give the unused part to other jobs. A job that ends could then change the
paces of all jobs. Both rules divide the busiest port, on which the end of a step depends, in the
same way.

Jobs with the same resources have the same pace, so these jobs form one group with one timer. For
example, all messages from one node to another node form a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from heapq import heappop, heappush
from itertools import count
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy


class Resource:
    """A resource, such as a NIC, on which `capacity` jobs run at the same time without slowing each
    other down. A job is a computation, a copy or a message.

    If there are more than `capacity` jobs, the capacity that the jobs divide is `capacity` ·
    `shared`.
    """

    __slots__ = ("capacity", "groups", "load", "shared")

    def __init__(self, capacity: float = 1.0, shared: float = 1.0) -> None:
        self.capacity = capacity
        self.shared = shared
        self.load = 0  # the number of jobs; a job that lists the resource twice counts twice
        self.groups: dict[JobGroup, None] = {}  # in order of arrival

    @property
    def share(self) -> float:
        return 1.0 if self.load <= self.capacity else self.shared * self.capacity / self.load


class JobGroup:
    """The jobs that use the same resources, and therefore progress at the same rate. A job is a
    computation, a copy or a message.

    `progress` is the work that has been done on a job that started together with the group. Work is
    counted in the seconds that it takes without other jobs. `jobs` contains each job and the value
    of `progress` at which the job ends.
    """

    __slots__ = ("jobs", "next_end", "pace", "progress", "resources", "since", "version")

    def __init__(self, resources: tuple[Resource, ...], now: float) -> None:
        self.resources = resources
        self.jobs: list[tuple[float, int, int, Callable[[], object]]] = []  # a heap
        self.pace = self.progress = 0.0
        self.since = now  # the time to which `progress` refers
        self.next_end = inf  # the progress at the time of the timer
        self.version = 0  # the number of the current timer; a timer with an old number does nothing

    def progress_at(self, now: float) -> float:
        return self.progress + (now - self.since) * self.pace


class ActiveJobs:
    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._groups: dict[tuple[Resource, ...], JobGroup] = {}
        # Numbers jobs, so that jobs with the same end are ended in the order of their starts.
        self._numbers = count()
        self._changed: dict[JobGroup, None] = {}  # groups whose timers can change at this time

    def start(
        self,
        seconds: float,
        resources: Sequence[Resource],
        end: Callable[[], object],
        jobs: int = 1,
    ) -> None:
        """Start `jobs` equal jobs. `end()` is called once, when all of these jobs have ended.

        A job uses a resource twice if `resources` lists the resource twice.
        """
        key, now = tuple(resources), self._env.now
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = JobGroup(key, now)
        heappush(group.jobs, (group.progress_at(now) + seconds, next(self._numbers), jobs, end))
        for resource in resources:
            resource.load += jobs
            resource.groups[group] = None
        self._change(resources)

    def _change(self, resources: Sequence[Resource]) -> None:
        """Compute the rates of all jobs on these resources again, after all jobs that start or end
        at the current time.
        """
        if not self._changed and any(resource.groups for resource in resources):
            self._after(0.0, self._settle)
        for resource in resources:
            self._changed.update(resource.groups)

    def _settle(self) -> None:
        now, changed = self._env.now, self._changed
        self._changed = {}
        for group in changed:
            if not group.jobs:
                continue
            pace = min(resource.share for resource in group.resources)
            next_end = group.jobs[0][0]
            if pace == group.pace and next_end == group.next_end:
                continue
            if pace != group.pace:
                group.progress = group.progress_at(now)
                group.since, group.pace = now, pace
            group.next_end = next_end
            group.version += 1
            left = next_end - group.progress_at(now)
            self._after(max(0.0, left) / pace, partial(self._end_next, group, group.version))

    def _end_next(self, group: JobGroup, version: int) -> None:
        """End the jobs of a group whose work is done. If `version` is not the group's current
        version, a later timer has replaced this one, and nothing is done.
        """
        if group.version != version:
            return
        group.progress, group.since = group.next_end, self._env.now
        ended: list[Callable[[], object]] = []
        load = 0
        while group.jobs and group.jobs[0][0] <= group.progress:
            _, _, jobs, end = heappop(group.jobs)
            load += jobs
            ended.append(end)
        group.version += 1
        group.next_end = inf
        for resource in group.resources:
            resource.load -= load
        if not group.jobs:
            del self._groups[group.resources]
            for resource in group.resources:
                resource.groups.pop(group, None)
        self._change(group.resources)
        for end in ended:
            end()

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: function())
