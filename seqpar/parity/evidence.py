"""The result of comparing two runs, as the input of diagnoses and reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from seqpar.core.arguments import Ints
from seqpar.parity.joining import MISSING, Floats, Key, Recording
from seqpar.parity.losses import IGNORED
from seqpar.parity.sharding import document_starts

Bools = NDArray[np.bool_]


@dataclass
class Finding:
    """The comparison of one thing that both runs have, such as the output of a module.

    Attributes:
        stage: "weight before", "input", "output", "label", "loss", "gradient of output",
            "gradient", "optimizer" or "weight after".
        name: the name of the module, the parameter or the number.
        error: the largest difference between the runs, relative to the size in the first run.
        bound: the largest relative difference that rounding explains.
        errors: (rows · tokens,) the relative difference of each token, NaN if the token was not
            compared. None if the finding is not about tokens.
        ranks: (rows · tokens,) for each token, the rank of the second run whose value has this
            difference.
        rank: the rank with the largest difference, if the finding is not about tokens.
        values: the values of both runs, if the finding is about a loss, a count or a learning rate.
        key: the key of the output in the recordings, if the finding is about an output.
    """

    stage: str
    name: str
    error: float
    bound: float
    errors: Floats | None = None
    ranks: Ints | None = None
    rank: int | None = None
    values: tuple[float, float] | None = None
    key: Key | None = None

    @property
    def is_real(self) -> bool:
        """Whether the runs differ here by more than rounding."""
        return not self.error <= self.bound

    @property
    def differing(self) -> Bools:
        """(rows · tokens,): whether each token differs by more than rounding."""
        assert self.errors is not None
        return np.nan_to_num(self.errors, nan=0.0, posinf=np.inf) > self.bound

    @property
    def first_token(self) -> int | None:
        """The index of the first token that differs, in the array (rows · tokens) of all tokens, or
        None.
        """
        if self.errors is None or not self.differing.any():
            return None
        return int(np.argmax(self.differing))

    @property
    def first_rank(self) -> int | None:
        """The rank of the second run that holds the first token that differs. If the finding is not
        about tokens, this is `rank`.
        """
        token = self.first_token
        return self.rank if token is None or self.ranks is None else int(self.ranks[token])


@dataclass
class Evidence:
    """Two recordings, and all findings about them in the order of execution. The position of each
    token in the batch is known.

    Attributes:
        a: the first recording, which is the reference.
        b: the second recording.
        ignored: (rows · tokens,) whether a token is padding, which is not compared.
        coarsest: the unit roundoff of the least precise dtype of the runs.
        scale: the factor by which the second run's output gradients are divided before they are
            compared; see `compare._scale_of_losses`.
        notes: sentences about what was found out and what could not be observed.
    """

    a: Recording
    b: Recording
    ignored: Bools
    notes: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    coarsest: float = 0.0
    scale: float = 1.0

    def add(self, findings: list[Any]) -> None:
        self.findings += [x for x in findings if x is not None]

    @property
    def first(self) -> Finding | None:
        """The first real difference."""
        return next((x for x in self.findings if x.is_real), None)

    def of_stage(self, *stages: str) -> list[Finding]:
        return [x for x in self.findings if x.stage in stages]

    def agree(self, *stages: str) -> bool:
        return not any(x.is_real for x in self.of_stage(*stages))

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, tokens) of the whole batch."""
        return self.a.shape

    @property
    def document_starts(self) -> Bools:
        """(rows, tokens): whether a document begins at each token, from the first run's inputs."""
        position_ids = self.a.joined_input("position_ids")
        if position_ids is None:
            position_ids = self.b.joined_input("position_ids")
        if position_ids is not None and (position_ids == MISSING).any():
            position_ids = None
        starts = document_starts(position_ids, self.shape)
        starts[0, self.a.row_starts] = starts[0, self.b.row_starts] = True
        for run in (self.a, self.b):
            cu_seqlens = run.ranks[0].input("cu_seqlens")
            if cu_seqlens is not None and cu_seqlens.ndim == 1 and self.shape[0] == 1:
                inside = cu_seqlens[(cu_seqlens >= 0) & (cu_seqlens < self.shape[1])]
                starts[0, inside.astype(np.int64)] = True
        return starts

    def losses(self, run: Recording) -> list[float]:
        """Return the loss of each rank, or [] if the loss of a rank is unknown."""
        found = []
        for rank in run.ranks:
            content = rank.content
            if "value" in content["stated_loss"]:
                found.append(content["stated_loss"]["value"])
            elif content["backwards"]:
                found.append(sum(content["backwards"]))
            elif content["model_loss"] is not None:
                found.append(content["model_loss"])
            elif content["cross_entropy"]:
                found.append(sum(x["value"] for x in content["cross_entropy"]))
        return found if len(found) == len(run.ranks) else []

    def label_counts(self, run: Recording) -> list[float] | None:
        """Return the number of labels of each rank, or None if the number of a rank is unknown."""
        found = []
        for rank in run.ranks:
            content, labels = rank.content, rank.rows_of("labels")
            if "labels" in content["stated_loss"]:
                found.append(content["stated_loss"]["labels"])
            elif content["cross_entropy"]:
                found.append(float(sum(x["labels"] for x in content["cross_entropy"])))
            elif labels is not None:
                found.append(float((labels >= 0).sum()))
        return found if len(found) == len(run.ranks) else None

    def token_loss_sums(self, run: Recording) -> list[float] | None:
        """Return each rank's sum of its tokens' losses, or None if a rank's losses are unknown."""
        labels = run.labels()
        if len(labels) < len(run.ranks):
            return None
        return [float(part.values[part.values[:, 0] != IGNORED, 1].sum()) for part in labels]
