"""Put beside a layer's own work what parameters and what waits in host memory take."""

from __future__ import annotations

from seqpar.simulate.recording.program import Begin, Copy, End, Post, Program, Wait

_SHARDED_PARAMETERS = -1  # an exchange number that no recorded code uses


def shard_beside(programs: list[Program], nbytes: int, passes: int) -> None:
    """Let ranks gather and reduce what a layer has, in so many passes, while they compute.

    A rank has as many of the layer's bytes as any other.
    """
    part = -(-nbytes // len(programs))
    for rank, program in enumerate(programs):
        others = tuple((peer, passes * part) for peer in range(len(programs)) if peer != rank)
        program.actions.insert(
            0, Post(_SHARDED_PARAMETERS, others, others, "parameters", "parameters")
        )
        program.actions.append(Wait(_SHARDED_PARAMETERS))


def offload_beside(program: Program, nbytes: int) -> None:
    """Let a rank copy bytes to its host beside forward, and back beside backward."""
    actions, halves = program.actions, []
    split = (i for i, x in enumerate(actions) if getattr(x, "what", "").endswith("backward"))
    first = next(split, len(actions) - 1)  # without attention the products of backward are last
    for half in (actions[:first], actions[first:]):
        copy = Program([Copy(nbytes, "offload")])
        halves += [Begin(copy), *half, End(copy)]
    program.actions = halves
