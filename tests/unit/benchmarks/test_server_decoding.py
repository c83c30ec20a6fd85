"""The benchmark of decoding on servers, in miniature."""

import torch

from benchmarks.servers import decoding
from tests.support.servers import connect, running


def test_steps_are_compared(tmp_path):
    with (
        running(f"ipc://{tmp_path}/s") as server,
        connect(server.address, home=False) as pool,
    ):
        row = decoding.compared(pool, 40, rounds=2)
        element, exact = torch.bfloat16.itemsize, 4
        step = (8 * 64 + 2 * 2 * 64) * element
        assert row["bytes"]["held"] == step + 8 * 65 * exact
        task = (8 * 64 + 40 * 2 * 2 * 64) * element + 48 + 4 * 41
        assert row["bytes"]["sent"] == task + 8 * 64 * element + 8 * exact
        assert all(len(x) == 2 for x in row["rounds"].values())
        assert server.status().caches == 0 or not pool.report().waiting
    text = decoding.table([{"transport": "grpc", **row}])
    assert "| grpc | 40 |" in text
