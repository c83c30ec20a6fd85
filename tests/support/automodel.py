"""Automodel's contract of sharders: the package itself if it is installed, else a stand-in."""

import importlib.util
import sys
import types
from dataclasses import dataclass

import torch

CONTRACT = "nemo_automodel.components.distributed.context_parallel.sharder"
INSTALLED = importlib.util.find_spec("nemo_automodel") is not None


@dataclass(frozen=True)
class ShardLayout:
    local_token_global_indices: torch.Tensor | None = None
    original_seq_len: int | None = None
    padded_seq_len: int | None = None
    input_row_shape: tuple[int, ...] | None = None
    input_token_stream_positions: torch.Tensor | None = None


class ContextParallelSharder:
    """What the tests need of the package's class, with its signatures."""

    def __init__(
        self,
        model=None,
        device_mesh=None,
        batch=None,
        *,
        shard_batch=None,
        local_token_global_indices=None,
        shard_layout=None,
        padding_token_id=0,
        num_chunks=1,
        loss_mask=None,
        invoke_pre_embed=True,
        extra_seq_buffers=None,
    ):
        if shard_batch is None:
            made = model.prepare_model_inputs_for_cp(batch, num_chunks=num_chunks)["cp_sharder"]
            shard_batch = made.shard_batch
            local_token_global_indices = made.local_token_global_indices
        self.shard_batch, self.shard_layout = shard_batch, shard_layout
        self.local_token_global_indices = local_token_global_indices
        self._mesh, self._loss_mask, self._padding = device_mesh, loss_mask, padding_token_id

    def shard(self, batch):
        options = {"loss_mask": self._loss_mask, "padding_token_id": self._padding}
        context, batch, self.shard_layout = self.shard_batch(
            self._mesh["cp"], None, batch, **options
        )
        return context, batch

    def shard_token_tensor(self, tensor, seq_dim=1, fill=None):
        layout = self.shard_layout
        if layout.input_row_shape is not None:
            tensor, seq_dim = tensor.flatten(0, 1), 0
        missing = layout.padded_seq_len - tensor.shape[seq_dim]
        if missing:
            shape = list(tensor.shape)
            shape[seq_dim] = missing
            tensor = torch.cat([tensor, tensor.new_full(shape, fill)], seq_dim)
        return tensor.index_select(seq_dim, self._indices(layout.padded_seq_len))

    def gather_token_tensor(self, tensor, seq_dim=1, trim=False, fill=None):
        layout, group = self.shard_layout, self._mesh["cp"].get_group()
        indices = self._indices(layout.padded_seq_len)
        parts = torch.distributed.nn.functional.all_gather(tensor.contiguous(), group=group)
        numbers = [torch.empty_like(indices) for _ in parts]
        torch.distributed.all_gather(numbers, indices, group=group)
        whole = torch.cat(list(parts), seq_dim).index_select(seq_dim, torch.cat(numbers).argsort())
        if trim and layout.input_row_shape is not None:
            return whole.reshape(*layout.input_row_shape, *whole.shape[seq_dim + 1 :])
        return whole.narrow(seq_dim, 0, layout.original_seq_len) if trim else whole

    def _indices(self, padded_seq_len, device=None):
        indices = self.shard_layout and self.shard_layout.local_token_global_indices
        if indices is None:
            return self.local_token_global_indices(self._mesh["cp"], padded_seq_len, device)
        return indices


class LinearCrossEntropy:
    """The base of Automodel's losses that read one token's logits."""


STAND_INS = {
    CONTRACT: {"ContextParallelSharder": ContextParallelSharder, "ShardLayout": ShardLayout},
    "nemo_automodel.components.loss.linear_ce": {"LinearCrossEntropy": LinearCrossEntropy},
}


def contract():
    """Return (ContextParallelSharder, seqpar.integrations.automodel), in any process."""
    if not INSTALLED:
        for name, members in STAND_INS.items():
            parts = name.split(".")
            for i in range(1, len(parts) + 1):
                sys.modules.setdefault(".".join(parts[:i]), types.ModuleType(".".join(parts[:i])))
            vars(sys.modules[name]).update(members)
    from seqpar.integrations import automodel

    return sys.modules[CONTRACT].ContextParallelSharder, automodel


def forward(model, mesh, batch, loss_mask=None):
    """Do what Automodel's recipe does with a batch; return its sharder, outputs and labels."""
    sharder = contract()[0](model, mesh, dict(batch), loss_mask=loss_mask)
    context, part = sharder.shard(dict(batch))
    labels = part.pop("labels")
    with context():
        return sharder, model(**part), labels


def forget():
    """Remove the stand-in from the imported modules, and the module that imported it."""
    if not INSTALLED:
        for name in list(sys.modules):
            if name == "seqpar.integrations.automodel" or name.split(".")[0] == "nemo_automodel":
                del sys.modules[name]
