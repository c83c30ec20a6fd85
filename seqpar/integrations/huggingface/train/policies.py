"""Overrides of methods of TRL's trainers GRPO and RLOO, for models that run over ranks.

The ranks of a group generate the same completions, with a cache that is spread over the ranks, and
then train on the completions as on any other batch.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from seqpar.integrations.huggingface.generate.generating import random_numbers_of_rank_0
from seqpar.integrations.huggingface.huggingface_private import TRL
from seqpar.integrations.huggingface.train.over_ranks import sessions_of
from seqpar.integrations.huggingface.train.preferences import OverRanksPreferences

_REFUSED = {
    "use_vllm": "vLLM would generate with a different number of processes",
    "use_transformers_continuous_batching": "generation would cache one rank's keys only",
    "tools": "each rank would call them, and the answers may differ",
    "environment_factories": "each rank would have environments of its own",
    "rollout_func": "each rank would have completions of its own",
}


class OverRanksPolicy(OverRanksPreferences):
    """A mixin for GRPO and RLOO trainers."""

    reward_funcs: list[Any]
    num_generations: int
    num_generations_eval: int

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name, reason in _REFUSED.items():
            if getattr(self, name, None):
                raise ValueError(f"{name} must not be set for an enabled model: {reason}")
        if TRL.read_if_set(self, "_is_vlm", False):
            reason = "completions with images are not tested"
            raise ValueError(f"processing_class must be a tokenizer for an enabled model: {reason}")
        self._check_dropout()
        if any(isinstance(x, nn.Module) and sessions_of(x) for x in self.reward_funcs):
            how = "each rank calls it with whole batches"
            raise ValueError(f"reward_funcs must not be enabled: {how}")
        # TRL counts all processes in this number, and every group has `size` processes.
        self.args = copy.copy(self.args)
        self.args.generation_batch_size //= self._sp.comm.size
        rows = {"train": self.args.generation_batch_size}
        if getattr(self, "eval_dataset", None) is not None:
            rows["eval"] = self.args.per_device_eval_batch_size * self._groups.count
        wanted = {"train": self.num_generations, "eval": self.num_generations_eval}
        for mode, count in rows.items():
            if count % wanted[mode]:
                what = f"per_device_{mode}_batch_size must give all groups together a multiple of"
                found = f"the {wanted[mode]} completions of a prompt, got {count}"
                raise ValueError(f"{what} {found}")

    def _prepare_inputs(self, inputs: Any) -> Any:
        with self._groups.counted(self), random_numbers_of_rank_0(self._sp.comm):
            return super()._prepare_inputs(inputs)  # type: ignore[misc]

    def _get_per_token_logps_and_entropies(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        return super()._get_per_token_logps_and_entropies(self._whole(model), *args, **kwargs)  # type: ignore[misc]
