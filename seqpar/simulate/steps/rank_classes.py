"""Classes of ranks whose programs are equal but for their peers: one of each class is recorded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from seqpar.costs.model import Model
from seqpar.layout.layout import Layout
from seqpar.simulate.recording.program import Action, Begin, Post, Program, Serve


def ranks_alike(strategy: str, mesh: tuple[int, int] | None, layout: Layout, model: Model) -> int:
    """Return the length of runs of ranks whose programs are equal but for their peers.

    Ranks that exchange heads compute the same tokens for different heads. Their programs are equal
    if they hold as many tokens and heads as the others of their run, that is Ulysses' ranks or a
    row of USP's mesh.
    """
    if strategy == "ulysses":
        length = layout.ranks
    elif strategy == "usp" and mesh is not None:
        length = mesh[1]
    else:
        return 1
    tokens = layout.tokens_per_rank
    runs = [set(tokens[i : i + length]) for i in range(0, layout.ranks, length)]
    return length if model.kv_heads % length == 0 and all(len(x) == 1 for x in runs) else 1


def as_rank(program: Program, recorded: int, rank: int, length: int) -> Program:
    """Return the program of another rank of the recorded rank's run.

    Peers in the same run, and those at the same place in other runs, move by the same distance.
    """
    if rank == recorded:
        return program

    def peer_of(peer: int) -> int:
        return peer - peer % length + (peer + rank - recorded) % length

    return _with_peers(program, peer_of)


def _with_peers(program: Program, peer_of: Callable[[int], int]) -> Program:
    def changed(action: Action) -> Action:
        if isinstance(action, Post):
            sends, recvs = (
                tuple(sorted((peer_of(peer), nbytes) for peer, nbytes in part))
                for part in (action.sends, action.recvs)
            )
            return replace(action, sends=sends, recvs=recvs)
        assert not isinstance(action, Serve | Begin)  # these strategies run one program
        return action

    return replace(program, actions=[changed(x) for x in program.actions])
