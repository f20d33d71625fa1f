"""Gates: the slim verifier's scores over a block -> a route for each drafted token. One file a kind of gate.

M' is the largest probability of the slim verifier at a position; a gate of the paper reads the confidence ratio
q'(v)/M' of the drafted token v (VIA-SD, App. B). Scores are logits or log-probabilities: no gate can tell them apart.
Routes travel as integer codes, indices into ``ROUTES``.

Named here are the parts that all gates share and the gates that need no explaining; a configuration names any gate by
its own file, so that adding one changes nothing here.
"""

from harness.decode.gate.base import ROUTES, Decision, Foreseeing, Gate, Tabled, routes_of
from harness.decode.gate.constant import AlwaysEscalate
from harness.decode.gate.thresholds import Literal, Strictness

__all__ = [
    "ROUTES",
    "AlwaysEscalate",
    "Decision",
    "Foreseeing",
    "Gate",
    "Literal",
    "Strictness",
    "Tabled",
    "routes_of",
]
