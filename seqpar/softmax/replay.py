"""Replay the steps of a strategy's forward or backward without running the strategy's code.

Steps are recorded for each combination of layout, mask, shapes, strides and options. The first
forward with a combination makes tables, the second forward records its steps, and all later
forwards replay the recorded steps (`seqpar.core.recording`). Backward does the same.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

from seqpar.comm.messages.comm import Comm
from seqpar.comm.messages.recorded_comm import recorded
from seqpar.core.device_tables import rehearsing
from seqpar.core.hooks import Hooks, hooks
from seqpar.core.memo import LOCAL, MAX_KEPT_SETTINGS, Memo
from seqpar.core.recording import Recorder, Recording
from seqpar.softmax.call import ResolvedCall

_NO_HOOKS = Hooks()


class _Passes:
    def __init__(self) -> None:
        self.have_run = False
        self.cannot_be_recorded = False
        self.recording: Recording | None = None


def replayed(
    name: Hashable,
    comm: Comm,
    call: ResolvedCall,
    tensors: Sequence[Tensor | None],
    compute: Callable[..., Sequence[Tensor]],
) -> Sequence[Tensor]:
    """Return `compute(comm, *tensors)`. Replay the recorded steps of `compute` if there are any.

    The steps of `compute` may depend only on its arguments, on `name`, and on everything in `call`
    except the values of tensors. All of its operators run in the calling thread and on the current
    stream.
    """
    if not _may_be_replayed(call):
        return compute(comm, *tensors)
    recordings = call.once((LOCAL, "recordings"), lambda: Memo(MAX_KEPT_SETTINGS))
    passes: _Passes = recordings((LOCAL, name, *_settings(comm, call, tensors)), _Passes)
    if passes.recording is not None:
        return passes.recording(comm, *tensors)
    if passes.cannot_be_recorded or not passes.have_run:
        results = compute(comm, *tensors)
        passes.have_run = True
        return results
    recorder = Recorder([comm, *tensors])
    with recorder:
        results = compute(recorded(comm), *recorder.inputs[1:])
        passes.recording = recorder.recording(results)
    passes.cannot_be_recorded = passes.recording is None
    return results


def _may_be_replayed(call: ResolvedCall) -> bool:
    has_others = call.max_logits is not None or call.options.slopes is not None
    return not has_others and not rehearsing() and hooks() == _NO_HOOKS


def _settings(
    comm: Comm, call: ResolvedCall, tensors: Sequence[Tensor | None]
) -> tuple[Hashable, ...]:
    """Return everything outside of `call` on which the steps of a forward or backward depend."""
    forms = [
        x if x is None else (x.dtype, x.shape, x.stride(), x.storage_offset(), x.data_ptr() % 16)
        for x in tensors
    ]
    switches: list[Hashable] = [
        torch.backends.cuda.cudnn_sdp_enabled(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    if call.shape.dtype == torch.float32:
        switches.append(torch.backends.cuda.matmul.fp32_precision)
    device = next(x.device for x in tensors if x is not None)
    # A stream waits in its first pass for the tables that the device copies on other streams.
    stream = torch.cuda.current_stream(device).stream_id if device.type == "cuda" else None
    return comm.is_routed, *switches, stream, *forms
