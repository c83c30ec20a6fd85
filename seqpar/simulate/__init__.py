"""The real code under virtual time: record what ranks do, and play it on a cluster.

programs = simulate.record(step, ranks)     # step(comm) is a rank's code, on meta tensors
outcome = simulate.play(programs, cluster)  # when all of it happens
outcome = simulate.step("ring", layout, cluster, model)
"""

from seqpar.simulate.auto import AutoAttention
from seqpar.simulate.choosing import Choice, choose
from seqpar.simulate.outcome import Outcome
from seqpar.simulate.pipeline import pipeline
from seqpar.simulate.playing import play
from seqpar.simulate.program import Program
from seqpar.simulate.recommendation import Recommendation, Recommendations
from seqpar.simulate.recommending import recommend
from seqpar.simulate.recording import record
from seqpar.simulate.serving import record_served
from seqpar.simulate.steps import Step, step

__all__ = [
    "AutoAttention",
    "Choice",
    "Outcome",
    "Program",
    "Recommendation",
    "Recommendations",
    "Step",
    "choose",
    "pipeline",
    "play",
    "recommend",
    "record",
    "record_served",
    "step",
]
