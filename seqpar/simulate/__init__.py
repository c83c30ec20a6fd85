"""The real code under virtual time: record what ranks do, and play it on a cluster.

programs = simulate.record(step, ranks)     # step(comm) is a rank's code, on meta tensors
outcome = simulate.play(programs, cluster)  # when all of it happens
outcome = simulate.step("ring", layout, cluster, model)
"""

from seqpar.auto.choosing import Choice, choose
from seqpar.auto.module import AutoAttention
from seqpar.comm.messages.exchange import Comm
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recommendations.recommendation import Recommendation, Recommendations
from seqpar.simulate.recommendations.recommending import recommend
from seqpar.simulate.recording.program import Program
from seqpar.simulate.recording.recording import record
from seqpar.simulate.recording.serving import record_served
from seqpar.simulate.steps.pipeline import pipeline
from seqpar.simulate.steps.steps import Step, step

__all__ = [
    "AutoAttention",
    "Choice",
    "Comm",
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
