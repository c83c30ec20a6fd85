"""Run the strategies' own code in virtual time.

    programs = simulate.record(step, ranks)     # step(comm) is one rank's code, on meta tensors
    outcome = simulate.play(programs, cluster)  # when each rank computes, sends and waits
    outcome = simulate.step("ring", layout, cluster, model)

A *program* is the list of a rank's actions: computations, messages and waits. To *play* programs is
to find out, in virtual time, when a cluster would carry out these actions.

`recording/` turns code into programs, and `playback/` plays programs. `steps/` simulates training
steps, and `recommendations/` ranks training configurations. Start with `recording/recording.py`.
"""

from seqpar.auto.choosing import Choice, choose
from seqpar.auto.module import AutoAttention
from seqpar.comm.messages.comm import Comm
from seqpar.simulate.playback.outcome import Outcome
from seqpar.simulate.playback.playing import play
from seqpar.simulate.recommendations.recommendation import Recommendation, Recommendations
from seqpar.simulate.recommendations.recommending import recommend
from seqpar.simulate.recording.program import Program
from seqpar.simulate.recording.recording import record
from seqpar.simulate.recording.serving import record_served
from seqpar.simulate.steps.pipeline import pipeline
from seqpar.simulate.steps.training_step import Step, step

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
