"""Show a comparison: as text for a terminal, as JSON, or as a picture in a file."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path
from typing import Any

import numpy as np

from seqpar.core.arguments import as_path
from seqpar.parity.evidence import Evidence, Finding
from seqpar.parity.picture import column_edges, draw, label, shown_findings

_WIDTH = 100
_NAME = 36  # characters of a name in the table
_ROWS_BEFORE, _ROWS_AFTER = 3, 8  # findings shown around the first difference
_CELLS = 56  # the number of characters that show tokens in a row of the picture
_PICTURE_ROWS = 24


class Report:
    """What a comparison found. `str(report)` is a table, a picture and a sentence.

    Attributes:
        first: the first finding that differs by more than rounding; None if the runs agree.
        diagnosis: one sentence that names the fault; None if the runs agree or no known fault
            explains the pattern.
        findings: all findings in the order of execution, including those in which the runs agree.
        notes: sentences about what was found out about the recordings, and what could not be
            observed.
    """

    def __init__(self, evidence: Evidence, diagnosis: str | None) -> None:
        self._evidence = evidence
        self.first, self.diagnosis = evidence.first, diagnosis
        self.findings, self.notes = evidence.findings, evidence.notes

    def __str__(self) -> str:
        return "\n".join([*self._head(), "", *self._table(), *self._picture(), *self._end()])

    def json(self) -> dict[str, Any]:
        """Return the report as values that `json` can write; infinite errors are null."""
        return {
            "first": None if self.first is None else self._described(self.first),
            "diagnosis": self.diagnosis,
            "runs": [str(x.folder) for x in (self._evidence.a, self._evidence.b)],
            "notes": self.notes,
            "findings": [self._described(x) for x in self.findings],
        }

    def plot(self, path: str | Path) -> None:
        """Draw into a file which tokens differ in which module, and mark each first difference.

        Args:
            path: the file; its suffix is the format, such as .png, .svg or .pdf.

        Raises:
            ValueError: if `path` is not a path, if its suffix is not a format of pictures, or if
                the recordings have no output of tokens in common.
            ImportError: if matplotlib is not installed.
        """
        draw(self._evidence, "\n".join(self._end()[1:]), as_path("path", path))

    def _described(self, x: Finding) -> dict[str, Any]:
        row, token = self._place(x)
        return {
            "stage": x.stage,
            "name": x.name,
            "differs": x.is_real,
            "error": x.error if math.isfinite(x.error) else None,
            "bound": x.bound if math.isfinite(x.bound) else None,
            "row": row,
            "token": token,
            "rank": x.first_rank if x.is_real else None,
            "values": x.values,
        }

    def _place(self, x: Finding) -> tuple[int | None, int | None]:
        if x.first_token is None:
            return None, None
        row, token = divmod(x.first_token, self._evidence.shape[1])
        return row, token

    def _head(self) -> list[str]:
        a, b = self._evidence.a, self._evidence.b
        ranks = [f"{x.name} ({len(x.ranks)} rank{'s' * (len(x.ranks) > 1)})" for x in (a, b)]
        rows, tokens = self._evidence.shape
        batch = f"{rows} row{'s' * (rows > 1)} of {tokens} tokens"
        notes = [line for x in self.notes for line in textwrap.wrap(f"note: {x}", _WIDTH)]
        return [f"{ranks[0]} and {ranks[1]}, {batch}", *notes]

    def _table(self) -> list[str]:
        lines = [f" {'stage':<19}{'name':<{_NAME}} {'error':>8} {'bound':>8}  where"]
        shown = self._shown()
        hidden: list[Finding] = []
        for i, x in enumerate(self.findings):
            if i in shown:
                lines += _counted(hidden)
                hidden = []
                lines.append(self._line(x))
            else:
                hidden.append(x)
        return lines + _counted(hidden)

    def _shown(self) -> set[int]:
        """Return the indices of the findings that have a line in the table. Findings without a line
        are only counted.
        """
        real = [i for i, x in enumerate(self.findings) if x.is_real]
        if not real:
            return {i for i, x in enumerate(self.findings) if x.stage in ("label", "loss")}
        first = real[0]
        shown = set(range(max(0, first - _ROWS_BEFORE), first + _ROWS_AFTER))
        for stage in {x.stage for x in self.findings}:  # the first difference of each stage
            shown |= set([i for i in real if self.findings[i].stage == stage][:1])
        shown |= {i for i, x in enumerate(self.findings) if x.stage in ("label", "loss")}
        return shown

    def _line(self, x: Finding) -> str:
        mark = "*" if x.is_real else " "
        numbers = f"{_number(x.error)} {_number(x.bound)}"
        name = f"{_cut(x.name, _NAME):<{_NAME}}"
        return f"{mark}{x.stage:<19}{name} {numbers}  {self._where(x)}".rstrip()

    def _where(self, x: Finding) -> str:
        if x.values is not None:
            return f"{x.values[0]:.7g}, {x.values[1]:.7g}"
        row, token = self._place(x)
        if token is None:
            return "" if x.first_rank is None else f"rank {x.first_rank}"
        row_of = f"row {row}, " if self._evidence.shape[0] > 1 else ""
        return f"{row_of}token {token}, rank {x.first_rank}"

    def _picture(self) -> list[str]:
        shown = shown_findings(self._evidence, _PICTURE_ROWS)
        first = next((x for x in shown if x.is_real), None)
        if first is None:
            return []
        run, edges = self._evidence.b, column_edges(self._evidence.a.tokens, _CELLS)
        cells = edges.size - 1
        width = min(_WIDTH - cells - 3, max(8, *(len(label(x)) for x in shown)))
        ranks = "".join(_digit(int(x)) for x in run.rank_of.ravel()[edges[:-1]])
        lines = [
            "",
            "Tokens from left to right: . agrees, # differs; > is the first module that differs.",
            f"{_cut('rank of ' + run.name, width + 2):<{width + 2}} {ranks}",
        ]
        for x in shown:
            row = "".join(_cell(x, edges[i], edges[i + 1]) for i in range(cells))
            mark = ">" if x is first else " "
            lines.append(f"{mark} {_cut(label(x), width):<{width}} {row}")
        every = shown_findings(self._evidence, len(self.findings))
        if more := len(every) - len(shown):
            lines.append(f"  … and {more} more")
        return lines

    def _end(self) -> list[str]:
        if self.first is None:
            return ["", "The runs agree: no difference exceeds rounding."]
        row, token = self._place(self.first)
        text = f"First difference: {self.first.stage} {self.first.name}"
        if token is not None:
            text += f", token {token}" + (f" of row {row}" if self._evidence.shape[0] > 1 else "")
        known = self.diagnosis or "No fault that seqpar knows explains this pattern."
        return ["", text, *textwrap.wrap(known, _WIDTH)]


def _counted(hidden: list[Finding]) -> list[str]:
    lines = []
    for stage in dict.fromkeys(x.stage for x in hidden):
        of_stage = [x for x in hidden if x.stage == stage]
        differing = sum(x.is_real for x in of_stage)
        state = f"of {len(of_stage)}, {differing} differ" if differing else f"{len(of_stage)} agree"
        lines.append(f" {stage:<19}… {state}")
    return lines


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[-(width - 1) :]


def _number(x: float) -> str:
    return f"{x:8.1e}" if math.isfinite(x) else "     inf"


def _digit(rank: int) -> str:
    return "-" if rank < 0 else "0123456789abcdefghijklmnopqrstuvwxyz"[rank % 36]


def _cell(x: Finding, start: int, stop: int) -> str:
    assert x.errors is not None
    if np.isnan(x.errors[start:stop]).all():
        return " "
    return "#" if x.differing[start:stop].any() else "."
