"""A plugin of pytest that continues a stopped run: it leaves out the tests that have passed.

`SEQPAR_PASSED=FILE python -m pytest -p tests.tools.passed …` adds the tests that pass to the file.
"""

import os
from pathlib import Path

_LONGEST = 2000  # the most characters of a failure that are printed


def file():
    """Return the file with the tests that have passed."""
    return Path(os.environ["SEQPAR_PASSED"])


class Noting:
    """Adds the tests that pass to the file, and prints failures at once.

    A run that is stopped prints no summary. If tests run in workers, only the leading process does
    this.
    """

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
    """Note the tests that pass, unless this process is a worker."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Noting(config))


def pytest_collection_modifyitems(config, items):
    """Leave out the tests that have passed."""
    passed = set(file().read_text().splitlines()) if file().is_file() else set()
    config.hook.pytest_deselected(items=[x for x in items if x.nodeid in passed])
    items[:] = [x for x in items if x.nodeid not in passed]


def pytest_sessionfinish(session, exitstatus):
    """Succeed if nothing was left to run."""
    if exitstatus == 5:  # no tests ran
        session.exitstatus = 0
