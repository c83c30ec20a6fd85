"""The option that assigns tasks to ranks: tasks, or a function that makes them for a layout."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import count

from seqpar.core.arguments import shown
from seqpar.layout.geometry import Geometry
from seqpar.layout.masks.mask import Mask
from seqpar.layout.tasks.tasks import TaskRectangles, as_tasks, check_tasks, digest_of

Plans = Callable[[Geometry, Geometry, Mask], TaskRectangles]


class Planner:
    """A user's tasks, or function that makes tasks, with a name that is the same on all ranks.

    Strategies are compared by their strings, so planners with the same name are one object.
    """

    def __init__(self, name: str, plan: TaskRectangles | Plans) -> None:
        self._name, self._plan = name, plan

    def __repr__(self) -> str:
        return self._name

    def __reduce__(self) -> tuple[object, ...]:
        return Planner.of, ("plan", self._plan)

    @classmethod
    def of(cls, option: str, plan: TaskRectangles | Plans | Planner) -> Planner:
        """Return the planner for a user's tasks or function; raise a ValueError for other values.

        The error names the option.
        """
        if isinstance(plan, Planner):
            return plan
        if isinstance(plan, TaskRectangles):
            plan = as_tasks(option, plan)
            name = f"Tasks({digest_of(plan)})"
            return _planners.setdefault(name, cls(name, plan))
        if not callable(plan):
            raise ValueError(f"{option} must be None, Tasks, or a function, got {shown(plan)}")
        kind = plan if hasattr(plan, "__qualname__") else type(plan)
        name = f"{kind.__module__}.{kind.__qualname__}"
        # Different functions with one name are numbered in the order in which they are first used.
        for number in count(1):
            planner = _planners.setdefault(f"{name}#{number}", cls(f"{name}#{number}", plan))
            if _same(planner._plan, plan):
                return planner
        raise AssertionError

    def tasks(self, option: str, queries: Geometry, keys: Geometry, mask: Mask) -> TaskRectangles:
        """Return the tasks of a batch.

        Raises a ValueError that names the option if the tasks do not have each visible pair once.
        """
        tasks = self._plan
        if not isinstance(tasks, TaskRectangles):
            tasks = as_tasks(option, tasks(queries, keys, mask))
        check_tasks(option, tasks, queries, keys, mask)
        return tasks


def _same(plan: object, other: object) -> bool:
    try:
        return bool(plan == other)
    except Exception:  # for example, callable objects that compare arrays
        return plan is other


_planners: weakref.WeakValueDictionary[str, Planner] = weakref.WeakValueDictionary()
