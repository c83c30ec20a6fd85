"""Shares: what takes time on resources that others use at the same time.

A job has seconds of work, as if it were alone, and resources: a core, the two ends of a link, NICs.
Each resource gives all of its jobs equal shares, of its capacity, and at most 1. A job goes on at
the least of its shares. What a job cannot use of a share is not given to others: then all that a
job which comes or goes changes is the pace of those beside it, however many there are elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy


class Resource:
    """Something that jobs share: `capacity` is how many it serves at full pace.

    Of more jobs it serves `shared` as much in all.
    """

    __slots__ = ("capacity", "jobs", "load", "shared")

    def __init__(self, capacity: float = 1.0, shared: float = 1.0) -> None:
        self.capacity, self.shared, self.load = capacity, shared, 0
        self.jobs: dict[ActiveJob, None] = {}  # in the order in which they came

    @property
    def share(self) -> float:
        """The pace of each of its jobs."""
        return 1.0 if self.load <= self.capacity else self.shared * self.capacity / self.load


class ActiveJob:
    """Work under way."""

    __slots__ = ("end", "pace", "remaining", "resources", "since", "version")

    def __init__(
        self, seconds: float, resources: Sequence[Resource], end: Callable[[], None]
    ) -> None:
        self.remaining, self.resources, self.end = seconds, resources, end
        self.pace = self.since = 0.0
        self.version = 0  # of the timer that says when it ends


class ActiveJobs:
    """All jobs of a simulation."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._changed: dict[ActiveJob, None] = {}  # whose pace may have changed in this instant

    def start(self, seconds: float, resources: Sequence[Resource], end: Callable[[], None]) -> None:
        """Start a job, and call `end()` when it has ended.

        A resource that is named twice is used twice.
        """
        job = ActiveJob(seconds, resources, end)
        for resource in resources:
            resource.load += 1
            resource.jobs[job] = None
        self._change(resources)

    def _change(self, resources: Sequence[Resource]) -> None:
        """Let the jobs of resources go on at another pace, once all has changed that now does."""
        if not self._changed and any(resource.jobs for resource in resources):
            self._after(0.0, self._settle)
        for resource in resources:
            self._changed.update(resource.jobs)

    def _settle(self) -> None:
        """Give all jobs that may have another pace theirs, and set their timers."""
        now, changed = self._env.now, self._changed
        self._changed = {}
        for job in changed:
            pace = min(resource.share for resource in job.resources)
            if pace == job.pace:
                continue
            job.remaining -= (now - job.since) * job.pace
            job.since, job.pace = now, pace
            job.version += 1
            self._after(max(0.0, job.remaining) / pace, self._timer(job))

    def _timer(self, job: ActiveJob) -> Callable[[], None]:
        """Return what ends a job, unless its pace changes before."""
        version = job.version

        def ring() -> None:
            if job.version != version:
                return
            job.version = -1
            self._changed.pop(job, None)
            for resource in job.resources:
                resource.load -= 1
                resource.jobs.pop(job, None)
            self._change(job.resources)
            job.end()

        return ring

    def _after(self, seconds: float, function: Callable[[], None]) -> None:
        self._env.timeout(seconds).callbacks.append(lambda _: function())
