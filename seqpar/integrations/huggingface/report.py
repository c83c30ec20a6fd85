"""How often each attention layer ran over the ranks, and how many bytes it sent."""

from __future__ import annotations

from dataclasses import dataclass, fields

from seqpar.integrations.huggingface.model.layers import AttentionLayer


@dataclass(frozen=True)
class LayerReport:
    """The calls and bytes of one attention layer.

    Attributes:
        calls: how often the layer's forward ran, recomputation included.
        forward_bytes, backward_bytes: bytes that this rank sent for the layer in each pass.
        ranks: the number of ranks that share each sequence.
        steps: how many of the calls were decoding steps, after a prefill.
        step_bytes: the forward bytes of these steps.
    """

    name: str
    calls: int
    forward_bytes: int
    backward_bytes: int
    ranks: int
    steps: int = 0
    step_bytes: int = 0

    @classmethod
    def of(cls, layer: AttentionLayer, ranks: int) -> LayerReport:
        counted = {x.name: getattr(layer, x.name) for x in fields(cls) if x.name != "ranks"}
        return cls(ranks=ranks, **counted)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent for the layer, in both passes."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Report:
    """Calls and bytes of each attention layer since its model was enabled; str() is a table.

    `whole` names modules with attention, such as a vision tower, that every rank computes whole.
    """

    strategy: str
    ranks: int
    layers: tuple[LayerReport, ...]
    whole: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """Calls of attention over the ranks, in all layers."""
        return sum(layer.calls for layer in self.layers)

    @property
    def bytes(self) -> int:
        """Bytes that this rank sent for attention, in all layers and both passes."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def steps(self) -> int:
        """How many of the calls were decoding steps, in all layers."""
        return sum(layer.steps for layer in self.layers)

    @property
    def step_bytes(self) -> int:
        """Bytes that this rank sent in decoding steps, in all layers."""
        return sum(layer.step_bytes for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers], default=0)
        head = f"{self.strategy} over {self.ranks} ranks: {self.calls} calls, {self.bytes:,} bytes"
        if self.steps:
            head += f"; {self.steps} of them decoding steps, {self.step_bytes:,} bytes"
        title = f"{'layer':{width}} {'calls':>8} {'forward':>16} {'backward':>16}"
        rows = [
            f"{x.name:{width}} {x.calls:8} {x.forward_bytes:16,} {x.backward_bytes:16,}"
            for x in self.layers
        ]
        whole = [f"{name}: whole on each rank" for name in self.whole]
        return "\n".join([head, title, *rows, *whole])
