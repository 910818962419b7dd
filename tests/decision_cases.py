"""Literal predictions and decisions, for tests of what is printed and drawn of them."""

from fourfold.plan.plan import Plan
from fourfold.plan.simulate import TimedAction
from fourfold.planner.predict.facts import Workload
from fourfold.planner.predict.prediction import MemoryParts, Prediction, StepTerms
from fourfold.planner.search.decision import Change, Decision, Refused
from fourfold.words.errors import Problem
from fourfold.words.program import Action, Verb

GIB = 2**30
NO_TERMS = StepTerms(*[0.0] * len(StepTerms._fields))
NO_MEMORY = MemoryParts(*[0.0] * len(MemoryParts._fields))


def prediction(plan: Plan, memory_gib: float = 1.0, sent: float = 0.0, **terms: float) -> Prediction:
    """A prediction with these milliseconds."""
    parts = NO_MEMORY._replace(weights=0.25 * memory_gib * GIB, activations=0.75 * memory_gib * GIB)
    terms = {name: each / 1e3 for name, each in terms.items()}
    return Prediction(plan, NO_TERMS._replace(**terms), (parts,) * plan.pp, {"dp": sent})


def timed(plan: Plan) -> Prediction:
    """A prediction with a timeline: a forward and a backward on each place."""
    actions = {
        rank: (TimedAction(Action(Verb.FORWARD, rank, 0), 0.01 * rank, 0.01 * rank + 0.01),
               TimedAction(Action(Verb.BACKWARD, rank, 0), 0.05, 0.07))
        for rank in range(plan.pp)
    }  # fmt: skip
    each = prediction(plan, compute=30.0, bubble=40.0)
    return Prediction(plan, each.terms, each.by_stage, each.sent_bytes, actions)


WORKLOAD = Workload(
    task="lm",
    machine="4 devices",
    num_parameters=870_000,
    batch_size=32,
    unit="tokens",
    num_units=32 * 128,
    flops=4e9,
    memory_bytes=2 * GIB,
    peak_flops=1e12,
)
BEST = prediction(Plan(dp=4, zero=1), 1.2, 12 * 2**20, compute=30.0, exposed=4.0, update=5.0, overhead=2.0)
EQUAL = prediction(Plan(dp=2, tp=2), 0.9, 14 * 2**20, compute=31.0, tensor=6.0, update=3.0, overhead=2.0)
SLOW = prediction(Plan(pp=4, microbatches=8), 0.4, 2**20, compute=34.0, bubble=20.0, update=2.0, overhead=3.0)
PLAIN = prediction(Plan(dp=4), 1.9, 24 * 2**20, compute=30.0, exposed=3.0, update=20.0, overhead=2.0)
TOO_LARGE = Refused(
    Plan(dp=4, zero=0, microbatches=1),
    2.0 * GIB,
    prediction=prediction(Plan(dp=4), 3.0, compute=20.0),
    changes=(Change("recompute", "full", prediction(Plan(dp=4, recompute="full"), 1.5)), Change("memory", 3 * GIB)),
)
ILLEGAL = Refused(Plan(tp=3), 2.0 * GIB, problems=(Problem("tp = 3 with 4 heads", "a divisor of 4", "tp = 4"),))
PINNED = (Problem("dp = 4", "dp = 2, as the ask pins it"), Problem("zero = 0", "zero = 1, as the ask pins it"))
ELSEWHERE = Refused(Plan(dp=4), 2.0 * GIB, problems=PINNED, prediction=prediction(Plan(dp=4), 1.0, compute=30.0))
TOO_LARGE_ELSEWHERE = Refused(Plan(dp=4), 0.5 * GIB, problems=PINNED[:1], prediction=ELSEWHERE.prediction)
DECISION = Decision(
    ranked=(BEST, EQUAL, SLOW),
    baselines={"data parallel, zero 0": PLAIN, "data parallel, zero 1": BEST, "tp within a host": ILLEGAL,
               "data parallel, zero 3": TOO_LARGE},
    refused=(TOO_LARGE,),
    front=(BEST, EQUAL, SLOW),
    error=0.08,
    bound=0.02,
    num_considered=312,
)  # fmt: skip
