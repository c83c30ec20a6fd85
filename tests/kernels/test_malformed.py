"""Walk the kernels' functions with malformed values: errors are ours, and name the argument."""

import numpy as np
import pytest
import torch
from seqpar.kernels import flash_attention as flash
from seqpar.kernels import lightning_attention as lightning

from tests.kernels.flash_cases import DEVICE, causal

T = 16
Q = torch.zeros(1, T, 2, 16, device=DEVICE)
ROWS = torch.zeros(1, T, 2, device=DEVICE)
CONFIG = flash.choose("forward", Q, Q)
SIZES = {"config": CONFIG, "device": Q.device}
HOPS = {"hops": [causal(T)], **SIZES}
SCORES = {"scale": 1.0, "softcap": 0.0, "slopes": ROWS[0, 0]}
OPERANDS = {"q": Q, "k": Q, "v": Q}
BACKWARD = OPERANDS | {"dout": Q, "lse": ROWS, "delta": ROWS, "config": CONFIG} | SCORES
ADD = {"slices": causal(T), **SIZES}
EDGES, NONE = np.array([0, T]), np.array([-1])
SEGMENTS = lightning.segment_tables(EDGES, np.array([0]), np.array([0]), T, Q.device, False)
STATE = torch.zeros(1, 1, 2, 16, 16, device=DEVICE)
WALK = {
    "tables": SEGMENTS,
    "config": lightning.choose("recurrence", Q, 16),
    "log_decay": torch.zeros(2, dtype=torch.float64, device=DEVICE),
    "scale": 1.0,
}

CALLS = {
    flash.choose: {"kind": "forward", "q": Q, "v": Q},
    flash.empty_partial: {"q": Q, "value_dim": 16},
    flash.merge_hops: {"hops": [flash.HopResult(Q, ROWS, 0)], "out": Q.clone()}
    | {"lse": ROWS.clone(), "partial_out": Q.float(), "partial_lse": ROWS.double()}
    | {"sinks": ROWS[0, 0]},
    flash.add_to_rows: {"part": Q, "total": Q.clone(), "sign": 1}
    | {"index": torch.arange(T, device=DEVICE)},
    flash.encode_rows: {"parts": [Q, Q], "index": torch.arange(T, device=DEVICE)}
    | {"code": torch.int8, "message": torch.zeros(T, 1, 2, 40, dtype=torch.int8, device=DEVICE)},
    flash.decode_rows: {"parts": [Q.clone(), Q.clone()], "code": torch.float8_e4m3fn}
    | {"message": torch.zeros(1, T, 2, 40, dtype=torch.int8, device=DEVICE)},
    flash.delta: {"out": Q, "dout": Q, "dlse": ROWS},
    flash.forward_launches: HOPS | {"programs": 0},
    flash.backward_launches: ADD | {"transposed": False},
    flash.forward: OPERANDS
    | {"launches": flash.forward_launches(**HOPS)[0], "config": CONFIG, "out": Q.clone()}
    | {"lse": ROWS.clone(), "partial_out": None, "partial_lse": None, "sinks": ROWS[0, 0]}
    | SCORES,
    flash.Results: {"q": Q, "out": Q.clone(), "lse": ROWS.clone(), "sinks": ROWS[0, 0]}
    | {"partial_out": None, "partial_lse": None}
    | SCORES,
    flash.forward_block: {"results": flash.Results(Q, Q.clone(), ROWS.clone(), None, None, 1.0)}
    | {"k": Q, "v": Q, "launches": flash.forward_launches(**HOPS)[0], "config": CONFIG},
    flash.Queries: {"q": Q, "dout": Q, "lse": ROWS, "delta": ROWS, "dq": Q.clone()} | SCORES,
    flash.backward: {"k": Q, "v": Q, "config": CONFIG, "q_config": CONFIG, "dk": Q.clone()}
    | {"queries": flash.Queries(Q, Q, ROWS, ROWS, Q.clone(), 1.0), "dv": Q.clone()}
    | {"launches": flash.backward_launches(**ADD, transposed=True)}
    | {"q_launches": flash.backward_launches(**ADD, transposed=False)},
    flash.backward_kv: BACKWARD
    | {"launches": flash.backward_launches(**ADD, transposed=True), "dk": Q.clone()}
    | {"dv": Q.clone(), "dq": Q.clone()},
    flash.backward_q: BACKWARD
    | {"launches": flash.backward_launches(**ADD, transposed=False), "dq": Q.clone()},
    lightning.choose: {"kind": "carry", "x": Q, "dim": 16},
    lightning.segment_length: {"tokens": 100, "count": 3},
    lightning.segment_tables: {"edges": EDGES, "incoming": NONE, "outgoing": NONE}
    | {"length": 16, "device": Q.device, "reverse": False},
    lightning.recurrence: WALK
    | {"x": Q, "y": Q, "z": Q, "out": Q.clone(), "between": STATE, "initial": STATE}
    | {"reverse": False},
    lightning.states: WALK | {"x": Q, "y": Q, "reverse": False},
    lightning.carry: WALK
    | {"x": Q, "before": Q, "out": Q.clone(), "initial": STATE, "reverse": False},
}
FLAGS = {"transposed", "reverse"}  # any value is true or false
NO_CALLS = {
    "MOST_HOPS",
    "Config",
    "HopResult",
    "Launch",
    "Launches",
    "SliceTable",
    "SegmentTables",
    "signature",  # of tensors that other functions check
}  # what functions take and return
VALUES = [
    *("nope", [1], {}, object(), 10**30, -1, 0.5, np.zeros(3), np.array([[1]]), 1j),
    *(torch.zeros(3, device=DEVICE), Q[..., :15], Q[:, 1:], Q[:, :, :1].repeat(1, 1, 3, 1)),
    *(Q[:, :, :0], Q[..., :0], Q.double(), Q.int(), Q.to("meta"), STATE[:, :, :1], STATE.half()),
    Q.new_zeros(1, T, 2, 300),
]


@pytest.mark.parametrize(
    "function", CALLS, ids=lambda x: f"{x.__module__.split('.')[-2]}.{x.__name__}"
)
def test_errors_are_ours_and_name_the_argument(function):
    good, wrong = CALLS[function], []
    function(**good)
    for argument in good.keys() - FLAGS:
        for value in VALUES:
            if argument in ("scale", "softcap", "programs") and isinstance(value, int | float):
                continue  # nothing is wrong with it, and the interpreter is slow
            try:
                function(**good | {argument: value})
            except ValueError as error:
                if not any(name in str(error) for name in good):
                    wrong.append((argument, value, error))
            except Exception as error:
                wrong.append((argument, value, error))
    assert not wrong, [f"{x}={value!r:.60}: {error!r:.200}" for x, value, error in wrong]


@pytest.mark.parametrize("module", [flash, lightning])
def test_the_walk_leaves_nothing_out(module):
    walked = {x.__name__ for x in CALLS if x.__module__.startswith(module.__name__)}
    assert walked | NO_CALLS & set(module.__all__) == set(module.__all__)
