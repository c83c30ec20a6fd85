"""Divide resources among the jobs that use them at the same time.

A job has an amount of work, in seconds of undisturbed progress, and resources: a core, the two ends
of a link, NICs. A resource gives all of its jobs equal shares of its capacity, at most 1 each, and
a job progresses at the smallest of its shares. The part of a share that a job cannot use is not
given to others. A job that starts or ends therefore only changes the pace of jobs on the same
resources. With max-min fairness, one ending job could change all 4,032 jobs of an all-to-all on 64
ranks. The busiest port, which decides when a step ends, is shared exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import simpy


class Resource:
    """A resource that serves `capacity` jobs at full pace.

    With more jobs, its total capacity drops to the fraction `shared`.
    """

    __slots__ = ("capacity", "jobs", "load", "shared")

    def __init__(self, capacity: float = 1.0, shared: float = 1.0) -> None:
        self.capacity = capacity
        self.shared = shared
        self.load = 0  # uses; a job that lists the resource twice counts twice
        self.jobs: dict[ActiveJob, None] = {}  # in order of arrival

    @property
    def share(self) -> float:
        """The pace that it gives each of its jobs."""
        return 1.0 if self.load <= self.capacity else self.shared * self.capacity / self.load


class ActiveJob:
    __slots__ = ("end", "pace", "remaining", "resources", "since", "version")

    def __init__(
        self, seconds: float, resources: Sequence[Resource], end: Callable[[], None]
    ) -> None:
        self.remaining, self.resources, self.end = seconds, resources, end
        self.pace = self.since = 0.0
        self.version = 0  # of the timer that ends the job


class ActiveJobs:
    """All jobs of a simulation."""

    def __init__(self, env: simpy.Environment) -> None:
        self._env = env
        self._changed: dict[ActiveJob, None] = {}  # jobs whose pace may change at this time

    def start(self, seconds: float, resources: Sequence[Resource], end: Callable[[], None]) -> None:
        """Start a job; call `end()` when it has ended.

        A resource that is listed twice is used twice.
        """
        job = ActiveJob(seconds, resources, end)
        for resource in resources:
            resource.load += 1
            resource.jobs[job] = None
        self._change(resources)

    def _change(self, resources: Sequence[Resource]) -> None:
        """Update the pace of all jobs on these resources, after all changes at the current time."""
        if not self._changed and any(resource.jobs for resource in resources):
            self._after(0.0, self._settle)
        for resource in resources:
            self._changed.update(resource.jobs)

    def _settle(self) -> None:
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
        """Return a callback that ends the job, unless its pace has changed in the meantime."""
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
