"""verl's engines on CPUs: its platform, its configs and batches; or a stand-in, without verl."""

import importlib.util
import os
import sys
import types

import torch

from tests.support import huggingface as hf

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


def data(**options):
    """A batch of packed sequences of verl's own data class."""
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
        name: torch.nested.as_nested_tensor(x, layout=torch.jagged) for name, x in tensors.items()
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


class Engine:
    """What seqpar's engines use of verl's FSDP engines, with the package's signatures."""

    def __init__(self, model_config, engine_config, optimizer_config, checkpoint_config):
        self.model_config, self.engine_config = model_config, engine_config
        self.ulysses_sequence_parallel_size = engine_config.ulysses_sequence_parallel_size
        self.use_ulysses_sp = self.ulysses_sequence_parallel_size > 1
        self.ulysses_parallel_group = engine_config.group

    def initialize(self):
        self.module = self._build_fsdp_module(self._build_module())

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
        temperature = torch.full(ids.shape, 0.7)
        rolled = {"input_ids_rmpad_rolled": ids.roll(-1), "temperature_rmpad": temperature}
        inputs |= {"attention_mask": None, **micro_batch.get("multi_modal_inputs", {})}
        return inputs, rolled | {"pad_size": 0}

    def _gather_and_unpad_packed(self, tensor, pad_size):
        return tensor


class Registry:
    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        return lambda engine_class: engine_class


def stand_in():
    """Put modules with the names that `seqpar.integrations.verl` imports in verl's place."""
    members = {
        "verl.utils.seqlen_balancing": {"get_seqlen_balanced_partitions": lambda *x: x},
        "verl.utils.tensordict_utils": {"get_non_tensor_data": lambda data, key, default: default},
        "verl.workers.engine.base": {"EngineRegistry": Registry},
        "verl.workers.engine.fsdp.transformer_impl": {
            "FSDPEngineWithLMHead": type("FSDPEngineWithLMHead", (Engine,), {}),
            "FSDPEngineWithValueHead": type("FSDPEngineWithValueHead", (Engine,), {}),
        },
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
