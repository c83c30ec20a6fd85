"""Train Megatron-Core's own GPT on CPUs: on ranks with seqpar's attention, and on one without."""

import contextlib
import re
import types
from dataclasses import dataclass, field
from unittest import mock

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

VOCABULARY, ROW = 64, 32
RATE = 0.5  # of SGD: parameters change by more than the tolerance in each step


class CpuForCuda(TorchFunctionMode):
    """Make tensors on the CPU that Megatron-Core asks for on the GPU."""

    def __torch_function__(self, func, kinds, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device")):
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)


@contextlib.contextmanager
def on_cpu():
    """Run Megatron-Core without GPUs, in this process."""
    from megatron.core import tensor_parallel
    from megatron.core.tensor_parallel import random

    # Its random numbers are those of dropout, which is 0.
    tracker = types.SimpleNamespace(fork=contextlib.nullcontext)
    with (
        mock.patch.object(torch.cuda, "current_device", return_value=torch.device("cpu")),
        mock.patch.object(torch.cuda, "current_stream", return_value=None),
        mock.patch.object(tensor_parallel, "get_cuda_rng_tracker", return_value=tracker),
        mock.patch.object(random, "_get_all_rng_states", return_value=()),
        mock.patch.object(random, "_set_all_rng_states"),
        CpuForCuda(),
    ):
        yield


@dataclass
class Case:
    """A model, how it is divided among ranks, and how documents are packed."""

    tp: int = 1
    cp: int = 1
    pp: int = 1
    experts: int = 0
    ep: int = 1  # the ranks that divide the experts, of those that hold different tokens
    strategy: str | None = None
    packing: str | None = None  # the format of packed sequences
    padded: bool = False
    hybrid: bool = False  # whether a scheduler chooses the ranks of each document
    config: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)

    @property
    def data(self):
        """The number of ranks that read different rows, of four."""
        return 4 // (self.tp * self.cp * self.pp)

    def spec(self):
        """Megatron's own spec of a layer."""
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

        return get_gpt_layer_local_spec(num_experts=self.experts or None)

    def lengths(self, row):
        """The documents of a row, which differ from row to row."""
        if self.packing is None:
            return [ROW]
        if self.packing == "sbhd" and not self.hybrid:
            return [5, 20, 7]
        return [[8, 16, 8], [24, 8], [ROW]][row % 3]

    def real(self, row):
        """The documents without their padding."""
        return [x - 3 * self.padded for x in self.lengths(row)]


def build(case, spec, alone=False):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    given = {"tensor_model_parallel_size": case.tp, "context_parallel_size": case.cp}
    if case.pp > 1:
        given |= {"pipeline_model_parallel_size": case.pp, "pipeline_dtype": torch.float32}
        given |= {"batch_p2p_sync": False}
    if case.experts:
        given |= {"num_moe_experts": case.experts, "moe_router_load_balancing_type": "none"}
        given |= {"expert_model_parallel_size": case.ep, "add_bias_linear": False}
    given |= case.config
    if case.hybrid:
        given |= {"hybrid_context_parallel": True, "max_seqlen_per_dp_cp_rank": ROW // 2}
    if alone:
        given = {
            name: x
            for name, x in given.items()
            if not {"parallel", "cp", "recompute", "pipeline", "p2p"} & set(name.split("_"))
        }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_query_groups=2,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        calculate_per_token_loss=True,
        init_method_std=0.2,
        **given,
    )
    torch.manual_seed(0)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCABULARY,
        max_sequence_length=2 * ROW,
        **{"position_embedding_type": "rope"} | case.model | ({} if alone else stage()),
    )
    return config, model


def stage():
    """Which ends of the model this rank's stage of the pipeline has."""
    from megatron.core import parallel_state

    first, last = (
        parallel_state.is_pipeline_first_stage(),
        parallel_state.is_pipeline_last_stage(),
    )
    return {"pre_process": first, "post_process": last}


def name_in_the_whole(case, name):
    """The name of a parameter of this rank's stage, with its experts, in the whole model."""
    from megatron.core import parallel_state

    first = parallel_state.get_pipeline_model_parallel_rank() * (2 // case.pp)
    name = re.sub(r"(?<=^decoder\.layers\.)\d+", lambda x: str(int(x[0]) + first), name)
    first = parallel_state.get_expert_model_parallel_rank() * (case.experts // case.ep)
    return re.sub(r"(?<=local_experts\.)\d+", lambda x: str(int(x[0]) + first), name)


def batch(step, row):
    """(ids, labels), each (1, ROW)."""
    generator = torch.Generator().manual_seed(100 * step + row)
    return torch.randint(VOCABULARY, (2, 1, ROW), generator=generator)


def positions(case, row):
    return torch.cat([torch.arange(x) for x in case.lengths(row)])[None]


def loss_mask(case, row):
    """1 for each token that is no padding."""
    whole, real = case.lengths(row), case.real(row)
    parts = [torch.arange(n) < r for n, r in zip(whole, real, strict=True)]
    return torch.cat(parts).float()[None]


def alone(case, steps, rows):
    """Losses, and the parameters before and after all steps, of Megatron's own attention."""
    from megatron.core import parallel_state

    parallel_state.initialize_model_parallel()
    _, model = build(case, case.spec(), alone=True)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total, count = 0.0, 0
        for row in range(rows):
            ids, labels = batch(step, row)
            start = 0
            for whole, real in zip(case.lengths(row), case.real(row), strict=True):
                part = slice(start, start + real)
                places = torch.arange(real)[None]
                found = model(ids[:, part], places, None, labels=labels[:, part])
                total, count, start = total + found.sum(), count + real, start + whole
        (total / count).backward()
        optimizer.step()
        losses.append(total.item() / count)
    parallel_state.destroy_model_parallel()
    return losses, before, dict(model.named_parameters())


def deal(case, group, row, step):
    """This rank's tokens and PackedSeqParams, as Megatron's get_batch makes them."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.utils import get_batch_on_this_cp_rank

    ids, labels = batch(step, row)
    given = {"tokens": ids, "labels": labels, "position_ids": positions(case, row)}
    given["loss_mask"] = loss_mask(case, row)
    if case.packing is None:
        return get_batch_on_this_cp_rank(given, False, cp_group=group), None
    lengths, real = case.lengths(row), case.real(row)
    cu, cu_real = (
        torch.cat([torch.zeros(1), torch.tensor(x).cumsum(0)]).int() for x in (lengths, real)
    )
    padded = {"cu_seqlens_q_padded": cu, "cu_seqlens_kv_padded": cu} if case.padded else {}
    longest = max(lengths) if case.packing == "thd" else ROW
    packed = PackedSeqParams(
        qkv_format=case.packing,
        cu_seqlens_q=cu_real,
        cu_seqlens_kv=cu_real,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        **padded,
    )
    if case.packing == "sbhd" or case.options.get("per_sequence_balancing"):
        return get_batch_on_this_cp_rank(given, False, cp_group=group), packed
    # Megatron deals documents with Transformer Engine, which needs a GPU.
    ranks, rank, index, start = group.size(), group.rank(), [], 0
    for length in lengths:
        chunks = torch.arange(start, start + length).chunk(2 * ranks)
        index += [chunks[rank], chunks[-1 - rank]] if ranks > 1 else list(chunks)
        start += length
    return {name: x[:, torch.cat(index)] for name, x in given.items()}, packed


def scheduled(case, config, rows, step):
    """Megatron's loader for hybrid context parallelism, with seqpar's scheduler."""
    from megatron.core.datasets.data_schedule import HybridCPDataLoaderWrapper

    from seqpar.integrations import megatron

    samples = []
    for row in rows:
        ids, labels = batch(step, row)
        cu_seqlens = torch.tensor([0, *case.lengths(row)]).cumsum(0).int()
        given = {"tokens": ids, "labels": labels, "position_ids": positions(case, row)}
        given["loss_mask"] = loss_mask(case, row)
        samples.append({name: x[0] for name, x in given.items()} | {"cu_seqlens": cu_seqlens})
    loader = HybridCPDataLoaderWrapper(iter([samples]), config)
    loader.cp_balancing_scheduler = megatron.PlanScheduler(
        config.max_seqlen_per_dp_cp_rank,
        loader.dp_cp_group,
        cluster="1x4-h100",
        model="llama-8b",
    )
    return loader


def deal_sample(case, sample):
    """This rank's tokens of a sample that the scheduler gave to some ranks."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.parallel_state import get_hybrid_data_context_parallel_groups
    from megatron.core.utils import get_batch_on_this_cp_rank

    size = sample.pop("local_cp_size")
    given = {name: x[None] for name, x in sample.items()}
    length = given["tokens"].shape[1]
    cu_seqlens = torch.tensor([0, length], dtype=torch.int32)
    given |= {"cu_seqlens": cu_seqlens[None], "local_cp_size": size}
    dealt = get_batch_on_this_cp_rank(
        given, True, hybrid_cp_group_func=get_hybrid_data_context_parallel_groups
    )
    packed = PackedSeqParams(
        qkv_format=case.packing,
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=length,
        max_seqlen_kv=length,
        local_cp_size=size.item(),
        cp_group=dealt.get("hybrid_cp_group"),
    )
    return dealt, packed


def on_rank(group, case, steps, micro_batches):
    """Train with Megatron's DDP and schedule, and alone: return both losses, and what differs most.

    A parameter differs by its largest difference, divided by its largest absolute value.
    """
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from seqpar.integrations import megatron

    with on_cpu():
        expected, before, after = alone(case, steps, micro_batches * case.data)
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=case.tp,
            pipeline_model_parallel_size=case.pp,
            context_parallel_size=case.cp,
            expert_model_parallel_size=case.ep,
            hierarchical_context_parallel_sizes=case.config.get(
                "hierarchical_context_parallel_sizes"
            ),
            hybrid_context_parallel=case.hybrid,
        )
        spec = megatron.sequence_parallel(case.spec(), case.strategy, **case.options)
        config, model = build(case, spec)
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(part_of(case, p, before[name_in_the_whole(case, name)]))
        model = DistributedDataParallel(
            config, DistributedDataParallelConfig(overlap_grad_reduce=False), model
        )
        config.finalize_model_grads_func = finalize_model_grads
        optimizer = torch.optim.SGD(model.parameters(), RATE)
        cp, dp = (
            parallel_state.get_context_parallel_group(),
            parallel_state.get_data_parallel_rank(),
        )
        losses = []
        for step in range(steps):
            rows = range(dp * micro_batches, (dp + 1) * micro_batches)
            loader = scheduled(case, config, rows, step) if case.hybrid else iter(rows)

            def forward(loader, model, step=step):
                found = next(loader)
                dealt, packed = (
                    deal_sample(case, found) if case.hybrid else deal(case, cp, found, step)
                )
                out = model(
                    dealt["tokens"],
                    dealt["position_ids"],
                    None,
                    labels=dealt["labels"],
                    packed_seq_params=packed,
                )

                def loss_of(out):
                    mask = dealt["loss_mask"]
                    total, count = (out * mask).sum(), mask.sum().int()
                    return total, count, torch.stack([total.detach(), count])

                return out, loss_of

            model.zero_grad_buffer()
            reported = get_forward_backward_func()(
                forward_step_func=forward,
                data_iterator=loader,
                model=model,
                num_microbatches=micro_batches,
                seq_length=ROW,
                micro_batch_size=1,
                forward_only=False,
            )
            for p in model.parameters():
                p.grad = p.main_grad
            optimizer.step()
            optimizer.zero_grad()  # autograd would add to the buffer itself
            total = torch.stack(reported).sum(0) if reported else torch.zeros(2)
            for group in (  # the last stage alone has losses
                parallel_state.get_data_parallel_group(with_context_parallel=True),
                parallel_state.get_pipeline_model_parallel_group(),
            ):
                dist.all_reduce(total, group=group)
            losses.append(float(total[0] / total[1]))
        worst, names = 0.0, []
        for name, p in model.module.named_parameters():
            names.append(name_in_the_whole(case, name))
            whole = part_of(case, p, after[names[-1]])
            assert p.shape == whole.shape, name
            difference = (p - whole).abs().max() / whole.abs().max()
            worst = max(worst, difference.item())
        assert case.pp * case.ep > 1 or names == list(after)
        parallel_state.destroy_model_parallel()
    return losses, expected, worst


def part_of(case, p, whole):
    """This rank's part of a parameter of the whole model."""
    from megatron.core import parallel_state

    if case.tp == 1 or not getattr(p, "tensor_model_parallel", False):
        return whole
    rank = parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(case.tp, p.partition_dim)[rank]
