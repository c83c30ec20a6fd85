"""Costs: seconds and bytes of a model on a cluster, without computing or sending anything.

Methods take numbers or arrays and return float64 arrays of the same shape. Seconds are those of one
device for the whole model, unless a method states otherwise. Each pass, forward or backward, has
its own cost. Recomputing a checkpointed layer costs one more forward.
"""

from __future__ import annotations

from functools import cached_property

import numpy as np
import torch
from numpy.typing import ArrayLike

from seqpar.attention.backend import DEFAULT
from seqpar.core.arguments import as_bool, as_choice, as_int, check_type
from seqpar.core.dtypes import accumulator_itemsize
from seqpar.costs.cluster import LINKS, Cluster, as_cluster
from seqpar.costs.grid import Floats, Tasks, as_amounts, owners_of, slice_tasks, span_tasks
from seqpar.costs.model import Layer, Model, as_model
from seqpar.layout.masks.mask import Slices
from seqpar.softmax.backends.varlen import HeadDims
from seqpar.softmax.compute.call_options import CallOptions
from seqpar.softmax.result_dtypes import dtype_of_one_call

CHECKPOINTING = ("none", "attention", "full")


class Costs:
    """The cost of work and messages of a `model` on a `cluster`.

    Names of presets can take the place of the cluster and the model: `Costs("1x8-h100",
    "llama-8b")`. The seconds of softmax attention come from the device's measured grid (see
    `Grid`). All other costs are amounts of FLOPs or bytes, divided by rates.
    """

    def __init__(self, cluster: Cluster | str, model: Model | str) -> None:
        self.cluster, self.model = as_cluster(cluster), as_model(model)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of weights and activations."""
        return self.cluster.device.itemsize

    @property
    def accumulator_itemsize(self) -> int:
        """Bytes of an element of partials, states and gradient sums: 8 in fp64, otherwise 4."""
        return accumulator_itemsize(self.itemsize)

    @property
    def optimizer_itemsize(self) -> int:
        """Bytes of Adam's state for each parameter: two moments and, for parameters with less than
        4 bytes, a copy with 4 bytes.
        """
        return 2 * self.accumulator_itemsize + (4 if self.itemsize < 4 else 0)

    @cached_property
    def key_gradient_itemsize(self) -> int:
        """The number of bytes of an element of dk in the dtype in which one kernel call returns dk.

        This is the dtype of k if FlashAttention-4 can compute the call, and otherwise the dtype of
        the accumulator.
        """
        # Only GPU kernels compute all tasks of a call together, so `fused` shows the kind of
        # device.
        device = torch.device("meta" if self.cluster.device.attention.fused else "cpu")
        dtype, dim = getattr(torch, self.cluster.device.dtype), self.model.head_dim
        options = CallOptions(1.0, 0.0, DEFAULT, True)
        return dtype_of_one_call(HeadDims(dtype, dim, dim), options, device, True).itemsize

    def attention(self, tasks: Tasks, backward: bool = False, heads: int | None = None) -> Floats:
        """Return the seconds (n,) of attention in one softmax layer, if each task is a separate
        call.

        `heads` is the number of query heads on the device, by default all heads.
        """
        check_type("tasks", tasks, Tasks)
        backward, heads = as_bool("backward", backward), self._heads(heads)
        grid = self.cluster.device.attention
        return grid.alone(tasks, heads, self.model.head_dim, backward)

    def attention_call(
        self,
        tasks: Tasks,
        owner: ArrayLike | None = None,
        owners: int = 1,
        backward: bool = False,
        heads: int | None = None,
    ) -> Floats:
        """Return (owners,): for each owner, the seconds of one softmax layer, if one call computes
        all tasks of the owner.

        A task is a number of query rows that attend to a number of keys. An owner is, for example,
        a rank. `owner` (n,) contains the index of each task's owner. By default, all tasks have the
        same owner.
        """
        check_type("tasks", tasks, Tasks)
        backward, heads = as_bool("backward", backward), self._heads(heads)
        grid = self.cluster.device.attention
        return grid.together(tasks, heads, self.model.head_dim, backward, owner, owners)

    def slice_seconds(self, slices: Slices, backward: bool = False) -> float:
        """Return the seconds of one softmax layer's call over the slices of a mask."""
        return float(self.attention_call(slice_tasks(slices), backward=backward)[0])

    def recurrent_call(self, tokens: ArrayLike, backward: bool = False) -> Floats:
        """Return the seconds of one linear layer's attention over a number of tokens."""
        tokens, backward = as_amounts("tokens", tokens), as_bool("backward", backward)
        call = self.cluster.device.recurrent.call[backward]
        return np.where(tokens > 0, call + self._recurrent_work(tokens, backward), 0.0)

    def span_work(self, starts: ArrayLike, stops: ArrayLike, backward: bool = False) -> Floats:
        """Return (n,): for each span, the seconds of its queries in the attention of all layers.

        A span has the positions start … stop − 1 of a document. The mask is causal, with a window
        in layers that have one. Linear layers are included. The constant cost of calls
        (`call_seconds`) is not included, so that the results for several spans can be added.
        """
        starts, stops = as_amounts("starts", starts), as_amounts("stops", stops)
        backward = as_bool("backward", backward)
        grid, heads, head_dim = self.cluster.device.attention, self.model.heads, self.model.head_dim
        seconds = np.zeros(np.broadcast_shapes(starts.shape, stops.shape))
        for layer, count in self._attentions:
            if layer.kind == "linear":
                seconds += count * self._recurrent_work(stops - starts, backward)
            else:
                tasks = span_tasks(starts, stops, layer.window)
                seconds += count * grid.work(tasks, heads, head_dim, backward)
        return seconds

    def call_seconds(self, backward: bool = False) -> float:
        """Return the constant part of the seconds of attention calls, summed over all layers."""
        device, backward = self.cluster.device, as_bool("backward", backward)
        return sum(
            count * (device.recurrent if x.kind == "linear" else device.attention).call[backward]
            for x, count in self._attentions
        )

    def span_seconds(
        self,
        starts: ArrayLike,
        stops: ArrayLike,
        owner: ArrayLike | None = None,
        owners: int = 1,
        backward: bool = False,
    ) -> Floats:
        """Return the seconds (owners,) of attention in all layers, with one call per layer and
        owner.

        Spans are as in `span_work`, and owners are as in `attention_call`. Waiting for keys is not
        included.
        """
        starts, stops = np.broadcast_arrays(*(np.atleast_1d(x) for x in (starts, stops)))
        index = owners_of(owner, starts, owners)
        starts, stops = starts.ravel(), stops.ravel()
        seconds = np.zeros(owners)
        for layer, count in self._attentions:
            if layer.kind == "linear":
                tokens = np.bincount(index, stops - starts, owners)
                seconds += count * self.recurrent_call(tokens, backward)
            else:
                tasks = span_tasks(starts, stops, layer.window)
                seconds += count * self.attention_call(tasks, index, owners, backward)
        return seconds

    def tokenwise(self, tokens: ArrayLike, backward: bool = False) -> Floats:
        """Return the seconds of all linear modules: projections, feed-forward parts and the head.

        The result is the larger of two times. The first time is the number of FLOPs divided by the
        FLOP/s that the device reaches; backward has twice the FLOPs of forward. The second time is
        the time for reading the modules' weights from memory.
        """
        device, tokens = self.cluster.device, as_amounts("tokens", tokens)
        ways = 2 if as_bool("backward", backward) else 1
        flops = ways * self.model.flops_per_token
        reading = ways * self.model.flops_per_token / 2 * self.itemsize / device.memory_bandwidth
        computing = tokens * flops / device.reached_rate
        return np.where(tokens > 0, np.maximum(computing, reading), 0.0)

    def message(
        self, nbytes: ArrayLike, link: str = "inside", *, senders: int = 1, nics: int = 1
    ) -> Floats:
        """Return the seconds of messages over a class of links. A message of 0 bytes takes 0 s.

        Args:
            nbytes: the bytes b of each message.
            link: "inside" a node, "between" nodes, or "host" (to or from host memory).
            senders: the number of devices of a node that send such a message to a different node at
                the same time. These devices share the NICs of the node.
            nics: the number x of NICs that each message uses. With x > 1, the message is divided
                into x equal parts, and x − 1 further devices in each of the two nodes forward one
                part each (Zeppelin's routing). The message then takes the sum of three times: for
                b·(x − 1)/x bytes inside the sender's node, for b/x bytes between the nodes, and for
                b·(x − 1)/x bytes inside the receiver's node.
        """
        as_choice("link", link, LINKS)
        cluster, nbytes = self.cluster, as_amounts("nbytes", nbytes)
        if link != "between":
            return getattr(cluster, link).seconds(nbytes)
        if cluster.nodes == 1:
            raise ValueError(
                'link must be "inside" or "host" on a cluster of one node, got "between"'
            )
        senders, nics = as_int("senders", senders, 1), as_int("nics", nics, 1)
        if nics > min(cluster.nics, cluster.devices_per_node):
            most = min(cluster.nics, cluster.devices_per_node)
            raise ValueError(
                f"nics must be at most {most}, the smaller of a node's NICs and devices, got {nics}"
            )
        # The fraction of a message that each NIC sends. If there are more senders than NICs / x, a
        # NIC sends parts of several messages.
        part = max(1 / nics, senders / cluster.nics)
        passed_on = cluster.inside.seconds(nbytes * (nics - 1) / nics)
        return cluster.between.seconds(nbytes * part) + 2 * passed_on

    def kv_bytes(self, tokens: ArrayLike) -> Floats:
        """Return the bytes of keys and values in one softmax layer."""
        return as_amounts("tokens", tokens) * self.model.key_value_elements * self.itemsize

    def attention_bytes(self, tokens: ArrayLike) -> Floats:
        """Return the bytes that attention reads and writes in all layers."""
        elements = sum(n * self.model.attention_elements(x) for x, n in self.model.counts.items())
        return as_amounts("tokens", tokens) * elements * self.itemsize

    def state_bytes(self) -> int:
        """Return the bytes of one span's state in one linear layer; 0 without linear layers."""
        return self.model.state_elements * self.accumulator_itemsize

    def activation_bytes_per_token(self, checkpointing: str = "none") -> tuple[int, int]:
        """Return the bytes per token of the activations in all layers, as two numbers (each, once).

        `each` is the number of bytes that are kept from forward to backward. `once` is the number
        of additional bytes that are needed while backward recomputes a layer. Without
        checkpointing, `once` is 0.

        `checkpointing` is "none"; "full", which keeps only each layer's input; or "attention",
        which also keeps the results of attention, as `seqpar.checkpoint` does. Logits are not
        included, because they are computed in chunks. Copies of tokens for several experts are also
        not included.
        """
        counts = self.model.counts
        kept = {layer: self.layer_bytes(layer, checkpointing) for layer in counts}
        each = sum(n * kept[layer] for layer, n in counts.items())
        return each, max(self.layer_bytes(layer) - kept[layer] for layer in counts)

    def layer_bytes(self, layer: Layer, checkpointing: str = "none") -> int:
        """Return the bytes per token that a layer keeps from forward to backward.

        Without checkpointing, these are the bytes in PyTorch with fused norms.
        """
        as_choice("checkpointing", checkpointing, CHECKPOINTING)
        model = self.model
        if checkpointing == "full":
            return model.hidden * self.itemsize
        if checkpointing == "attention":
            return model.hidden * self.itemsize + self._result_bytes(layer)
        # Kept are the inputs of two norms and two numbers for each norm, the inputs of the
        # projections after these norms, the operands and results of attention, and what `ffn_bytes`
        # counts.
        if layer.kind == "linear":
            projected = model.attention_elements(layer)
        else:
            queries = model.heads * model.head_dim
            projected = queries * (2 if model.output_gate else 1) + model.key_value_elements
        attention = (2 * model.hidden + projected) * self.itemsize + self._norm_bytes
        return attention + self._result_bytes(layer) + self.ffn_bytes(layer)

    def ffn_bytes(self, layer: Layer) -> int:
        """Return the bytes per token that the feed-forward part of a layer and its norm keep from
        forward to backward, without checkpointing.
        """
        tensors = 4 if self.model.gated else 2
        kept = (2 * self.model.hidden + tensors * layer.ffn) * self.itemsize
        return kept + self._norm_bytes

    def ffn_gradient_bytes(self, layer: Layer) -> int:
        """Return the most bytes per token by which gradients within the feed-forward part of a
        layer exceed the tensors that its backward has freed.
        """
        return (2 if self.model.gated else 1) * layer.ffn * self.itemsize

    def activation_bytes(self, tokens: ArrayLike, checkpointing: str = "none") -> Floats:
        """Return the peak bytes of activations in a step of one micro-batch.

        `checkpointing` is "none", "attention" (`seqpar.checkpoint`) or "full".
        """
        return as_amounts("tokens", tokens) * sum(self.activation_bytes_per_token(checkpointing))

    def kept_bytes(self, tokens: ArrayLike, checkpointing: str = "none") -> Floats:
        """Return the bytes kept from forward to backward in all layers."""
        return as_amounts("tokens", tokens) * self.activation_bytes_per_token(checkpointing)[0]

    def parameter_bytes(self, ranks: int | None = None, stage: int = 3) -> int:
        """Return the bytes of parameters, gradients and Adam's state on each rank.

        All of these are sharded over `ranks` ranks, by default over all ranks. Parameters and
        gradients have `itemsize` bytes each. Adam's two moments have 4 bytes each, or 8 in fp64.
        Parameters with less than 4 bytes also have a copy with 4 bytes.

        `stage` is the stage of ZeRO, which determines what is sharded:

        * 0: nothing;
        * 1: Adam's state and the copies of 4 bytes;
        * 2: also gradients;
        * 3 (FSDP): also parameters. This stage needs memory for the gathered parameters of two
          layers.
        """
        ranks, stage = self._sharding(ranks, stage)
        model, itemsize = self.model, self.itemsize
        parts = [
            self.optimizer_itemsize,
            itemsize,
            itemsize,
        ]  # the order in which the stages of ZeRO shard them
        sharded, whole = sum(parts[:stage]), sum(parts[stage:])
        gathered = 0
        if stage == 3 and ranks > 1:
            largest = max(map(model.layer_parameters, model.counts))
            gathered = min(2, len(model.layers)) * largest * itemsize
        return model.parameters * whole - (-model.parameters * sharded // ranks) + gathered

    def optimizer_seconds(self, ranks: int | None = None, stage: int = 3) -> float:
        """Return the seconds of Adam's update on a rank: bytes divided by the memory bandwidth.

        A rank updates the parameters of its shard or, at stage 0, all parameters. For each
        parameter, the update reads the gradient and the parameter (or its fp32 copy), reads and
        writes two moments of 4 bytes (8 in fp64), and writes the parameter. `ranks` and `stage` are
        as in `parameter_bytes`.
        """
        ranks, stage = self._sharding(ranks, stage)
        parameters, itemsize = self.model.parameters, self.itemsize
        updated = parameters if stage == 0 else -(-parameters // ranks)
        moments = 4 * self.accumulator_itemsize
        moved = updated * (2 * itemsize + moments + (2 * 4 if itemsize < 4 else itemsize))
        return moved / self.cluster.device.memory_bandwidth

    def token_capacity(
        self, checkpointing: str = "none", ranks: int | None = None, stage: int = 3
    ) -> int:
        """Return the number of tokens whose activations fit into the memory that parameters leave
        free on a device.
        """
        free = self.cluster.device.memory - self.parameter_bytes(ranks, stage)
        return max(0, int(free // sum(self.activation_bytes_per_token(checkpointing))))

    @property
    def _attentions(self) -> list[tuple[Layer, int]]:
        """For each kind of attention, the first layer of this kind and the number of such
        layers.
        """
        kinds: dict[tuple[str, int | None], tuple[Layer, int]] = {}
        for layer, count in self.model.counts.items():
            first, before = kinds.get((layer.kind, layer.window), (layer, 0))
            kinds[layer.kind, layer.window] = first, before + count
        return list(kinds.values())

    def _heads(self, heads: int | None) -> int:
        return self.model.heads if heads is None else as_int("heads", heads, 1, 2**31 - 1)

    def _recurrent_work(self, tokens: Floats, backward: bool) -> Floats:
        r = self.model.recurrence
        if r is None:
            raise ValueError(
                f"model must have linear layers, got {self.model.name}, which has none"
            )
        heads = r.value_heads, r.key_dim, r.value_dim
        return self.cluster.device.recurrent.work(tokens, *heads, backward)

    def _sharding(self, ranks: int | None, stage: int) -> tuple[int, int]:
        ranks = self.cluster.ranks if ranks is None else ranks
        ranks, stage = as_int("ranks", ranks, 1), as_int("stage", stage, 0, 3)
        return ranks, stage

    @property
    def _norm_bytes(self) -> int:
        return 2 * self.accumulator_itemsize  # a mean and a scale for each token

    def _result_bytes(self, layer: Layer) -> int:
        model = self.model
        if layer.kind == "linear":
            assert model.recurrence is not None
            return model.recurrence.values * self.itemsize
        lse_bytes = self.accumulator_itemsize
        return model.heads * (model.head_dim * self.itemsize + lse_bytes)
