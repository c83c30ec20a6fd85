"""The cost model where the LASP-2 paper measured: Linear-Llama3-1B on 64 A100, beside what was published.

A step is a constant, which all lengths pay, 6 FLOPs a parameter and token, and its layers' linear attention. The constant and
the utilization of the GPUs are fitted to two published points (`FITTED`); all else is assumed, from the sources named below.
"""

from __future__ import annotations

from typing import Any

from linear_model import Machine, compute, passes, seconds

RANKS, LAYERS, HEADS, DIM = 64, 16, 16, 128
PARAMETERS = 1.24e9  # of Llama 3.2 1B; assumed to be as many with linear attention
PEAK = 312e12  # FLOP/s of an A100 in bf16, by its data sheet
LINEAR_UTILIZATION = 0.3  # of that peak by the kernels of linear attention, assumed
# calculon-ai/calculon, systems/a100_80g.json: 25 GB/s a GPU across nodes at 90%, 300 GB/s within them at 65%; 20 and 10 µs
A100 = Machine(
    RANKS,
    area=4 * DIM / (PEAK * LINEAR_UTILIZATION),  # softmax attention takes 4 D FLOPs for each pair of query and key
    latency=20e-6,
    byte=1 / (25e9 * 0.9),
    ports=1,
    node=8,
    inner_latency=10e-6,
    inner_byte=1 / (300e9 * 0.65),
)
LENGTHS = [2, 16, 64, 128, 256, 512, 1024, 2048, 4096]  # Ki tokens over all ranks
PUBLISHED = {2: 1285, 16: 9305, 64: 34118, 128: 67344, 256: 130215, 512: 245353, 1024: 442221}  # LASP-2's tokens/s
RATIOS = {"LASP-1": {512: 1.073, 2048: 1.152}, "Ring": {512: 1.178, 2048: 1.366}}  # LASP-2's speed over theirs
FITTED = 2, 1024  # the published points to which the constant and the utilization are fitted
PAPERS = "LASP-2 collective"
CONTENDERS = (PAPERS, "LASP-2 all_gather", "LASP-2 scan", "LASP-1", "Ring", "data parallel")


def attention(contender: str, length: int) -> float:
    """Seconds of all layers' linear attention in a step."""
    return LAYERS * seconds(contender, A100, passes(length * 1024 // RANKS, HEADS, DIM))


def arithmetic(length: int) -> float:
    """Seconds of all else at the peak."""
    return 6 * PARAMETERS * length * 1024 / RANKS / PEAK


def published_step(length: int) -> float:
    return length * 1024 / PUBLISHED[length]


def fitted() -> tuple[float, float]:
    """The seconds that each step takes besides, and the utilization."""
    short, long = FITTED
    rest = [published_step(length) - attention(PAPERS, length) for length in FITTED]
    slowness = (rest[1] - rest[0]) / (arithmetic(long) - arithmetic(short))
    return rest[0] - slowness * arithmetic(short), 1 / slowness


def step(contender: str, length: int) -> float:
    constant, utilization = fitted()
    return constant + arithmetic(length) / utilization + attention(contender, length)


def added(contender: str, length: int) -> float:
    """Seconds of a step that data parallel does not have."""
    parts = passes(length * 1024 // RANKS, HEADS, DIM)
    return attention(contender, length) - LAYERS * compute("data parallel", A100, parts)


def table() -> list[dict[str, Any]]:
    """A row a length: tokens/s of each contender, LASP-2's speed over theirs, and what was published."""
    rows = []
    for length in LENGTHS:
        steps = {contender: step(contender, length) for contender in CONTENDERS}
        rows.append(
            {
                "tokens": length * 1024,
                "published": PUBLISHED.get(length),
                "tokens_per_second": {contender: length * 1024 / steps[contender] for contender in CONTENDERS},
                "ratio": {contender: steps[contender] / steps[PAPERS] for contender in CONTENDERS},
                "published_ratio": {name: found[length] for name, found in RATIOS.items() if length in found},
                "added_seconds": {contender: added(contender, length) for contender in CONTENDERS},
                "why": why(length),
            }
        )
    return rows


def why(length: int) -> list[str]:
    """A sentence for each gap between the model and what was published at a length."""
    found = []
    if length in FITTED:
        found.append("LASP-2: none, the model is fitted to this point")
    elif length in PUBLISHED:
        waits, computes = added(PAPERS, length), arithmetic(length) / fitted()[1]
        found.append(
            f"LASP-2: {published_step(length):.2f} s a step where the model has {step(PAPERS, length):.2f}, of which "
            f"{waits * 1e3:.0f} ms are communication and {computes * 1e3:.0f} arithmetic; the published steps grow by 0.33 s "
            "from 2K to 64K tokens, where ranks have little to compute: a cost of the framework that the constant does not have"
        )
    hops, base = LAYERS * 2 * (RANKS - 1), published_step(length) if length in PUBLISHED else step(PAPERS, length)
    if length in RATIOS["LASP-1"]:
        published, ours = (RATIOS["LASP-1"][length] - 1) * base / hops, added("LASP-1", length) / hops
        found.append(
            f"LASP-1: the published difference is {published * 1e6:.0f} µs a hop and the model's hop takes {ours * 1e6:.0f}; a "
            "state is as large at any length and that difference is not, as if their LASP-1 worked on its tokens between hops"
        )
    if length in RATIOS["Ring"]:
        whole = RATIOS["Ring"][length] * base
        block = passes(length * 1024 // RANKS, HEADS, DIM)[0].block
        found.append(
            f"Ring: 63 hops of keys and values, and of q and dout, are {hops * block / 1e9:.0f} GB, and in the whole of the "
            f"published step, {whole:.1f} s, a link across nodes carries {whole / A100.byte / 1e9:.0f} at the "
            "assumed rate: there were fewer heads of keys than here, or fewer ranks around a ring"
        )
    return found


def show() -> list[dict[str, Any]]:
    constant, utilization = fitted()
    rows = table()
    print(
        f"\nLinear-Llama3-1B on {RANKS} A100 by the model: {constant:.2f} s a step whatever its length, arithmetic at "
        f"{utilization:.0%} of the peak, both fitted to LASP-2 at {' and '.join(f'{x}K' for x in FITTED)} tokens"
    )
    print(f"tokens/s{'':6}{'published':>10}", *(f"{contender:>18}" for contender in CONTENDERS))
    for row in rows:
        rates = (f"{rate:18,.0f}" for rate in row["tokens_per_second"].values())
        print(f"{row['tokens'] // 1024:12}K {row['published'] or '':>10}", *rates)
    print(f"\n{'LASP-2 collective is faster by':28}", *(f"{contender:>18}" for contender in CONTENDERS[1:]))
    for row in rows:
        known = row["published_ratio"]
        ratios = (
            f"{row['ratio'][contender]:.3f}" + (f" ({known[contender]:.3f})" if contender in known else "")
            for contender in CONTENDERS[1:]
        )
        print(f"{row['tokens'] // 1024:12}K {'':15}", *(f"{ratio:>18}" for ratio in ratios))
    print(
        "(published)\nThe library's all_gather sends a state to each GPU of a node and NCCL's collective once to each node, "
        "which is why it is behind where states outweigh tokens; scan sends it once to one GPU.\n"
    )
    for row in rows:
        for sentence in row["why"]:
            print(f"{row['tokens'] // 1024}K, {sentence}.")
    return rows


if __name__ == "__main__":
    show()
