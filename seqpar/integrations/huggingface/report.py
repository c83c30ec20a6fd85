"""What attention layers have done so far: the proof that sequence parallelism is active."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LayerReport:
    """What one attention layer has done.

    `calls` counts its forwards, those of recomputation too. The bytes are what this rank sent for
    it, in forward and in backward; `ranks` is how many ranks computed together. `steps` of the
    calls, with `step_bytes` of the forward's, were behind a prefill, with its keys in a cache.
    """

    name: str
    calls: int
    forward_bytes: int
    backward_bytes: int
    ranks: int
    steps: int = 0
    step_bytes: int = 0

    @property
    def bytes(self) -> int:
        """What this rank sent for the layer, in both passes."""
        return self.forward_bytes + self.backward_bytes


@dataclass(frozen=True)
class Report:
    """What each attention layer of a model has done since it was enabled; str() is a table.

    `whole` names what has attention beside the model's text, as a tower for images, which each rank
    computes whole.
    """

    strategy: str
    ranks: int
    layers: tuple[LayerReport, ...]
    whole: tuple[str, ...] = ()

    @property
    def calls(self) -> int:
        """How often attention was computed over the ranks, in all layers."""
        return sum(layer.calls for layer in self.layers)

    @property
    def bytes(self) -> int:
        """What this rank sent for attention, in all layers and both passes."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def steps(self) -> int:
        """How many of the calls were behind a prefill, in all layers."""
        return sum(layer.steps for layer in self.layers)

    @property
    def step_bytes(self) -> int:
        """What this rank sent for these, in all layers."""
        return sum(layer.step_bytes for layer in self.layers)

    def __str__(self) -> str:
        width = max([len(layer.name) for layer in self.layers], default=0)
        head = f"{self.strategy} over {self.ranks} ranks: {self.calls} calls, {self.bytes:,} bytes"
        if self.steps:
            head += f"; behind prefills {self.steps} of them, {self.step_bytes:,}"
        title = f"{'layer':{width}} {'calls':>8} {'forward':>16} {'backward':>16}"
        rows = [
            f"{x.name:{width}} {x.calls:8} {x.forward_bytes:16,} {x.backward_bytes:16,}"
            for x in self.layers
        ]
        beside = [f"{name}: whole on each rank" for name in self.whole]
        return "\n".join([head, title, *rows, *beside])
