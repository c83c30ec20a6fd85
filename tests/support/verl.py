"""verl's engines on CPUs: its platform, its configs and batches; or a stand-in, without verl."""

import contextlib
import functools
import importlib.util
import os
import sys
import types

import torch
import torch.distributed as dist
import transformers

from tests.support import huggingface as hf
from tests.support.ranks import device_mesh

INSTALLED = importlib.util.find_spec("verl") is not None
LENGTHS = (9, 2, 12, 5)
PROMPTS = (3, 1, 4, 2)  # tokens without a loss, at the beginning of each sequence


def on_cpu(settings="{}"):
    """Import seqpar's engines for verl, in a process without a GPU."""
    os.environ["SEQPAR_VERL"] = settings
    if not INSTALLED:
        stand_in()
        from seqpar.integrations import verl

        return verl
    from verl.plugin.platform import platform_base, platform_manager

    if not isinstance(platform_manager._current_platform, platform_base.PlatformBase):
        methods = dict.fromkeys(platform_base.PlatformBase.__abstractmethods__, lambda *x: None)
        of_cpu = {
            "device_name": "cpu",
            "vendor_name": "none",
            "current_device": lambda self: "cpu",
            "is_available": lambda self: True,
            "device_module": torch.cpu,
        }
        kind = type("PlatformCPU", (platform_base.PlatformBase,), methods | of_cpu)
        platform_manager.set_platform(kind())
    from verl.models.transformers import monkey_patch

    from seqpar.integrations import verl

    # Not earlier: verl's plugins would import the engines before the platform is set.
    os.environ["VERL_ENGINE_DEVICE"] = "seqpar"
    monkey_patch.is_trl_available = lambda: False  # verl imports names of TRL 0.27
    return verl


def engine(folder, ranks, model_type="language_model", **options):
    """An engine as verl's worker makes it, on `ranks` ranks that share each sequence."""
    from verl.trainer.config import CheckpointConfig
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine.base import EngineRegistry

    model_config = HFModelConfig(
        path=str(folder),
        load_tokenizer=False,
        override_config={"attn_implementation": "sdpa"},
        enable_gradient_checkpointing=False,
        model_type=model_type,
    )
    engine_config = FSDPEngineConfig(
        strategy="fsdp2",
        ulysses_sequence_parallel_size=ranks,
        mixed_precision={"param_dtype": "fp32", "reduce_dtype": "fp32"},
        use_torch_compile=False,
        **options,
    )
    optimizer_config = FSDPOptimizerConfig(
        lr=0.1, total_training_steps=4, optimizer="SGD", optimizer_impl="torch.optim"
    )
    return EngineRegistry.new(
        model_type,
        "fsdp2",
        model_config=model_config,
        engine_config=engine_config,
        optimizer_config=optimizer_config,
        checkpoint_config=CheckpointConfig(),
    )


def data(part=slice(None), **options):
    """A batch of packed sequences of verl's own data class: this part of all sequences."""
    from verl.utils import tensordict_utils as tu

    generator = torch.Generator().manual_seed(1)
    ids = [torch.randint(3, hf.VOCABULARY, (n,), generator=generator) for n in LENGTHS]
    masks = [
        torch.cat([torch.zeros(p), torch.ones(n - p)]).long()
        for n, p in zip(LENGTHS, PROMPTS, strict=True)
    ]
    tensors = {
        "input_ids": ids,
        "position_ids": [torch.arange(n) for n in LENGTHS],
        "loss_mask": masks,
    }
    nested = {
        name: torch.nested.as_nested_tensor(x[part], layout=torch.jagged)
        for name, x in tensors.items()
    }
    settings = {
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 8,
        "temperature": 0.7,
        "calculate_entropy": True,
        "use_remove_padding": True,
        "pad_mode": "no_padding",
        **options,
    }
    return tu.get_tensordict(nested, settings)


# The names of the parameters of verl 0.9.1 that seqpar's engines and the example depend on.
SIGNATURES = {
    "verl.utils.seqlen_balancing": {
        "get_seqlen_balanced_partitions": ["seqlen_list", "k_partitions", "equal_size"],
    },
    "verl.utils.tensordict_utils": {
        "get_non_tensor_data": ["data", "key", "default"],
        "get_tensordict": ["tensor_dict", "non_tensor_dict"],
    },
    "verl.workers.engine.base": {
        "EngineRegistry.register": ["model_type", "backend", "device", "vendor"],
        "EngineRegistry.new": ["model_type", "backend", "args", "kwargs"],
    },
    "verl.workers.engine.fsdp.transformer_impl": {
        f"{engine}.{name}": ["self", *names]
        for engine in ("FSDPEngineWithLMHead", "FSDPEngineWithValueHead")
        for name, names in {
            "__init__": [
                *("model_config", "engine_config", "optimizer_config", "checkpoint_config"),
            ],
            "initialize": [],
            "_build_module": [],
            "_build_fsdp_module": ["module"],
            "prepare_model_inputs": ["micro_batch"],
            "_gather_and_unpad_packed": ["tensor", "pad_size"],
            "train_mode": ["kwargs"],
            "train_batch": ["data", "loss_function"],
        }.items()
    },
    "verl.workers.utils.losses": {"sft_loss": ["config", "model_output", "data", "dp_group"]},
}
# The fields of verl's configs that the example gives. The package has more.
FIELDS = {
    "verl.workers.config": {
        "HFModelConfig": [
            *("path", "load_tokenizer", "override_config", "enable_gradient_checkpointing"),
        ],
        "FSDPEngineConfig": [
            *("strategy", "ulysses_sequence_parallel_size", "mixed_precision"),
            "use_torch_compile",
        ],
        "FSDPOptimizerConfig": [
            *("lr", "weight_decay", "clip_grad", "total_training_steps", "optimizer"),
            "optimizer_impl",
        ],
    },
    "verl.trainer.config": {"CheckpointConfig": []},
}


class Engine:
    """What seqpar's engines and the example use of verl's FSDP engines.

    Each rank holds all weights, and gradients are averaged over all ranks, as FSDP does.
    """

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
        self.optimizer_config = optimizer_config
        self.ulysses_sequence_parallel_size = ranks = engine_config.ulysses_sequence_parallel_size
        self.use_ulysses_sp = ranks > 1
        self.ulysses_parallel_group = engine_config.group
        if engine_config.group is None and dist.is_initialized():
            mesh = device_mesh(dist.get_world_size() // ranks, ranks, names=("dp", "sp"))
            self.ulysses_parallel_group = mesh["sp"].get_group()

    def initialize(self):
        self.module = self._build_fsdp_module(self._build_module())
        if self.optimizer_config is not None:
            self.optimizer = torch.optim.SGD(self.module.parameters(), self.optimizer_config.lr)

    @contextlib.contextmanager
    def train_mode(self, **kwargs):
        self.module.train()
        yield
        self.optimizer.zero_grad()

    def train_batch(self, data, loss_function):
        inputs, outputs = self.prepare_model_inputs(data)
        logits = self.module(**inputs).logits[0] / outputs["temperature_rmpad"][:, None]
        chosen = outputs["input_ids_rmpad_rolled"][:, None]
        logs = logits.log_softmax(-1).gather(1, chosen)[:, 0]
        whole = self._gather_and_unpad_packed(logs, outputs["pad_size"])
        offsets = data["input_ids"].offsets()
        found = {"log_probs": torch.nested.nested_tensor_from_jagged(whole, offsets)}
        count = int(data["loss_mask"].values().sum())
        loss, _ = loss_function(found, data | {"dp_size": 1, "batch_num_tokens": count})
        loss.backward()
        for p in self.module.parameters():
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()
        self.optimizer.step()
        return {"loss": [loss.item()]}

    def _build_module(self):
        assert self.ulysses_sequence_parallel_size == 1
        return self.model_config.model

    def _build_fsdp_module(self, module):
        return module

    def prepare_model_inputs(self, micro_batch):
        assert not self.use_ulysses_sp
        ids = micro_batch["input_ids"].values()
        inputs = {
            "input_ids": ids[None],
            "position_ids": micro_batch["position_ids"].values()[None],
        }
        temperature = torch.full(ids.shape, micro_batch.get("temperature", 0.7))
        rolled = {"input_ids_rmpad_rolled": ids.roll(-1), "temperature_rmpad": temperature}
        inputs |= {"attention_mask": None, **micro_batch.get("multi_modal_inputs", {})}
        return inputs, rolled | {"pad_size": 0}

    def _gather_and_unpad_packed(self, tensor, pad_size):
        return tensor


class EngineRegistry:
    engines = {}  # noqa: RUF012

    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        return lambda engine_class: cls.engines.setdefault(model_type, engine_class)

    @classmethod
    def new(cls, model_type, backend, *args, **kwargs):
        return cls.engines[model_type](*args, **kwargs)


class Config:
    """A config that has what it is given, and what set-up reads of a config of text alone."""

    use_fused_kernels, group = False, None
    mtp = types.SimpleNamespace(enable=False)
    router_replay = types.SimpleNamespace(mode="disabled")

    def __init__(self, **fields):
        vars(self).update(fields)

    @functools.cached_property
    def model(self):
        return transformers.LlamaForCausalLM.from_pretrained(self.path)

    @property
    def hf_config(self):
        return self.model.config


def get_seqlen_balanced_partitions(seqlen_list, k_partitions, equal_size):
    raise AssertionError("the tests with the stand-in let the plan form partitions")


def get_non_tensor_data(data, key, default):
    return data.get(key, default)


def get_tensordict(tensor_dict, non_tensor_dict=None):
    return tensor_dict | (non_tensor_dict or {})


def sft_loss(config, model_output, data, dp_group=None):
    """The mean loss of the tokens that the mask names; each logarithm is of the next token."""
    mask = data["loss_mask"].values().roll(-1)
    total = (model_output["log_probs"].values() * mask).sum()
    return -total / data["batch_num_tokens"] * data["dp_size"], {}


def stand_in():
    """Put modules with the names that `seqpar.integrations.verl` imports in verl's place."""
    members = {
        "verl.trainer.config": {"CheckpointConfig": Config},
        "verl.utils.seqlen_balancing": {
            "get_seqlen_balanced_partitions": get_seqlen_balanced_partitions
        },
        "verl.utils.tensordict_utils": {
            "get_non_tensor_data": get_non_tensor_data,
            "get_tensordict": get_tensordict,
        },
        "verl.workers.config": dict.fromkeys(FIELDS["verl.workers.config"], Config),
        "verl.workers.engine.base": {"EngineRegistry": EngineRegistry},
        "verl.workers.engine.fsdp.transformer_impl": {
            "FSDPEngineWithLMHead": type("FSDPEngineWithLMHead", (Engine,), {}),
            "FSDPEngineWithValueHead": type("FSDPEngineWithValueHead", (Engine,), {}),
        },
        "verl.workers.utils.losses": {"sft_loss": sft_loss},
    }
    for path, found in members.items():
        parts = path.split(".")
        for i in range(1, len(parts) + 1):
            name = ".".join(parts[:i])
            made = sys.modules.setdefault(name, types.ModuleType(name))
            if i > 1:
                setattr(sys.modules[".".join(parts[: i - 1])], parts[i - 1], made)
        vars(sys.modules[path]).update(found)


def forget():
    """Remove the stand-in from the imported modules, and the module that imported it."""
    if not INSTALLED:
        for name in list(sys.modules):
            if name == "seqpar.integrations.verl" or name.split(".")[0] == "verl":
                del sys.modules[name]


def configs(ranks=2, group=None, model=None, **options):
    """Configs with the attributes that set-up reads."""
    settings = {"model_type": "llama", "fused": False, "mtp": False, "replay": "disabled"} | options
    model_config = types.SimpleNamespace(
        hf_config=types.SimpleNamespace(model_type=settings["model_type"]),
        use_fused_kernels=settings["fused"],
        mtp=types.SimpleNamespace(enable=settings["mtp"]),
        model=model,
    )
    engine_config = types.SimpleNamespace(
        ulysses_sequence_parallel_size=ranks,
        use_fused_kernels=False,
        router_replay=types.SimpleNamespace(mode=settings["replay"]),
        group=group,
    )
    return model_config, engine_config, None, None
