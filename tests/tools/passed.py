"""A plugin of pytest that goes on where a run was stopped: it leaves out what has passed.

`SEQPAR_PASSED=FILE python -m pytest -p tests.tools.passed …` adds the tests that pass to the file.
"""

import os
from pathlib import Path

_LONGEST = 2000  # characters of a failure that are printed at once


def file():
    """Return the file with the tests that have passed."""
    return Path(os.environ["SEQPAR_PASSED"])


class Noting:
    """Adds what passes to the file, and prints at once what fails: a run that is stopped has no
    summary. Where tests run in workers, only the process that leads them does."""

    def __init__(self, config):
        self._plugins = config.pluginmanager

    def pytest_runtest_logreport(self, report):
        if report.when == "call" and report.passed:
            with file().open("a") as opened:
                opened.write(report.nodeid + "\n")
        elif report.failed:
            terminal = self._plugins.get_plugin("terminalreporter")
            terminal.write_line(f"\n{report.nodeid}\n{str(report.longrepr)[-_LONGEST:]}")


def pytest_configure(config):
    """Note what passes, unless this process is a worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Noting(config))


def pytest_collection_modifyitems(config, items):
    """Leave out what has passed."""
    passed = set(file().read_text().splitlines()) if file().is_file() else set()
    config.hook.pytest_deselected(items=[x for x in items if x.nodeid in passed])
    items[:] = [x for x in items if x.nodeid not in passed]


def pytest_sessionfinish(session, exitstatus):
    """Succeed if nothing was left to run."""
    if exitstatus == 5:  # no tests ran
        session.exitstatus = 0
