"""NaNs and infinities: those of one document get to no other, on no rank, nor to earlier tokens'
chunks."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from seqpar import Layout
from tests.support.linear_cases import LinearCase, run
from tests.support.ranks import virtual
from tests.support.tiers import few_rows

DOCUMENTS = [0, 37, 38, 38, 120]
LAYOUTS = {
    "one rank": Layout.contiguous(DOCUMENTS, 1),
    "contiguous": Layout.contiguous(DOCUMENTS, 3),
    "zigzag": Layout.zigzag(DOCUMENTS, 3),
    "uneven": Layout.from_spans(
        [[(0, 0, 37)], [(3, 0, 9), (3, 60, 82)], [], [(1, 0, 1), (3, 9, 60)]], DOCUMENTS
    ),
}
INPUTS = ["q", "k", "v", "dout", "initial", "dstates"]


@dataclasses.dataclass(frozen=True)
class Poisoned(LinearCase):
    """A call in which one token of a document, or one of its states, is not finite."""

    name: str | None = None
    document: int = 0
    position: int = 0
    value: float = math.nan

    def inputs(self):
        inputs = dict(zip(INPUTS, super().inputs(), strict=True))
        if self.name == "dstates":
            inputs["dstates"][-1][self.document] = self.value
        elif self.name == "initial":
            inputs["initial"][self.document] = self.value
        elif self.name is not None:
            token = int(self.layout.cu_seqlens[self.document]) + self.position
            inputs[self.name][token] = self.value
        return tuple(inputs.values())


def of_others(results, document):
    """What a call returned for the other documents."""
    first, stop = DOCUMENTS[document : document + 2]
    rows = np.r_[:first, stop : DOCUMENTS[-1]]
    others = np.delete(np.arange(len(DOCUMENTS) - 1), document)
    return {
        name: x[others if name in ("state", "dinitial") else rows] for name, x in results.items()
    }


@few_rows()
@pytest.mark.parametrize("transport", ["all_gather", "scan"])
@pytest.mark.parametrize("backend", ["aten", "reference"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_isolated(causal, layout, backend, transport):
    """Bit for bit, on every rank."""
    layout = LAYOUTS[layout]
    clean = Poisoned(
        layout,
        causal=causal,
        decay=3.0 if causal else None,
        begun=True,
        returned=True,
        backend=backend,
        transport=transport,
        chunk=4,
        dtype=torch.float32,
    )
    expected = virtual(layout.ranks, run, clean)
    poisons = itertools.product(INPUTS, [(0, 20, math.nan), (3, 0, math.inf), (3, 81, math.nan)])
    for name, (document, position, value) in poisons:
        poison = {"name": name, "document": document, "position": position, "value": value}
        found = virtual(layout.ranks, run, dataclasses.replace(clean, **poison))
        for mine, right in zip(found, expected, strict=True):
            assert not all(np.isfinite(x).all() for x in mine.values())
            mine, right = of_others(mine, document), of_others(right, document)
            for result, x in mine.items():
                assert np.array_equal(x, right[result]), (poison, result)


@few_rows()
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("layout", ["one rank", "contiguous", "zigzag"])
def test_earlier_chunks_do_not_see_it(layout, name):
    """Within a document: rows of other chunks see a token if it is not behind them."""
    chunk, token = 4, 38 + 41
    case = Poisoned(LAYOUTS[layout], decay=3.0, chunk=chunk, name=name, document=3, position=41)
    out = virtual(case.layout.ranks, run, case)[0]["out"]
    lost = ~np.isfinite(out).reshape(len(out), -1).all(1)
    assert lost[token] and not lost[: token - chunk + 1].any()
    assert lost[token:].all() if name != "q" else lost.sum() == 1
