"""The law of training: the fields in which trainings differ, which values are legal together, and the expected result.

place    how many ranks, on how many hosts, and the transport between them
row      one value of each field; `case_of` makes a `Case` of it
oracle   the same training in one process, in plain torch: `fourfold.testing.oracle`, `tests/*_oracle.py`
Law: the library decides what is legal. A legal training that no oracle can compute is listed here, with the reason.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from fourfold.axes.context.rules.layout import RINGS
from fourfold.axes.tensor.attach.axis import place_shards
from fourfold.optim import user_optimizer
from fourfold.plan.plan_fields import PLAN_FIELDS
from fourfold.step.model_checks import check_plan_on_ranks, check_update_timing
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.words.errors import PlanError
from tests import cases, codec_oracle, local_sgd_oracle, pairs, precision_oracle
from tests.awkward_models import AWKWARD_MODELS
from tests.cases import Case
from tests.pairs import Row


class Place(NamedTuple):
    """The number of ranks and of hosts, and the transport."""

    size: int
    hosts: int = 1
    transport: str = "auto"

    @property
    def kind(self) -> str:
        return "hosts" if self.hosts > 1 else "group" if self.transport == "gloo" else "shared"


PLACES = (
    Place(4, 2),
    Place(4, transport="gloo"),
    Place(4, transport="shared"),
    Place(3),
    Place(2),
    Place(1),
    Place(3, transport="gloo"),
    Place(6, 3),
)
TINY, UNEVEN, TWELVES, SIXTEENS = (1, 9, 2), (12, 9, 13, 7), (12,) * 3, (16,) * 2
LENGTH, ODD_LENGTH = 16, 11
Sequence = tuple[int, str, int]  # cp, ring, ulysses
SEQUENCES: tuple[Sequence, ...] = (
    (1, "zigzag", 1),
    *((2, ring, 1) for ring in RINGS),
    (2, "zigzag", 2),
    (4, "zigzag", 2),
    (4, "plain", 2),
)
TENSOR_SIZES = (1, 2, 4)
STEP = ("step", 10, 1.0, 0.0)  # sync, local steps, rate and momentum of the outer update
CHOICES: dict[str, tuple[Any, ...]] = {
    "place": PLACES,
    "zero": PLAN_FIELDS["zero"].choices,
    "update": PLAN_FIELDS["update"].choices,
    "shard": (None, 1, 2),
    "model": ("mlp", "tied", "frozen", "unused", "lm", "digits", *AWKWARD_MODELS),
    "loss": tuple(cases.LOSSES),
    "optimizer": ("AdamW", "SGD", "LAMB", "LARS", "Adagrad", "descent"),
    "batch_sizes": (TINY, UNEVEN, TWELVES, SIXTEENS),
    "length": (LENGTH, ODD_LENGTH),
    "sequence": SEQUENCES,
    "tp": TENSOR_SIZES,
    "microbatches": (1, 2, 3),
    "clip": (None, 0.05),
    "bucket_bytes": (1500, 1, 2**20),
    "unused": PLAN_FIELDS["unused"].choices,
    "codec": PLAN_FIELDS["codec"].choices,
    "sync": (STEP, ("local", 1, 0.7, 0.0), ("local", 2, 1.0, 0.9)),
    "dtypes": (("keep", "keep"), ("keep", "fp32"), ("bf16", "keep"), ("bf16", "fp32"), ("fp16", "fp32")),
    "offload": PLAN_FIELDS["offload"].choices,
}
PLAIN: Row = {name: values[0] for name, values in CHOICES.items()} | {"place": Place(2), "zero": 1}
LM = PLAIN | {"model": "lm", "sequence": (2, "zigzag", 1)}
BASES = (
    PLAIN,
    PLAIN | {"model": "tied", "zero": 3, "loss": "pair"},
    PLAIN | {"model": "unused", "unused": "allow"},
    LM,
    LM | {"sequence": (4, "zigzag", 2), "place": Place(4, transport="shared")},
    PLAIN | {"tp": 2},
    PLAIN | {"tp": 4, "place": Place(4, transport="shared")},
    LM | {"tp": 2, "place": Place(4, transport="shared")},
    PLAIN | {"codec": "topk"},
    PLAIN | {"codec": "bf16", "batch_sizes": SIXTEENS},
    PLAIN | {"sync": ("local", 2, 1.0, 0.9), "zero": 0, "batch_sizes": UNEVEN},
    PLAIN | {"dtypes": ("bf16", "keep"), "optimizer": "SGD", "batch_sizes": TWELVES},
    PLAIN | {"dtypes": ("keep", "fp32"), "optimizer": "SGD"},
)


def case_of(row: Row) -> Case:
    fields = {name: row[name] for name in row if name not in ("place", "sequence", "sync", "dtypes")}
    fields |= dict(zip(("cp", "ring", "ulysses"), row["sequence"], strict=True))
    fields |= dict(zip(("sync", "local_steps", "outer_lr", "outer_momentum"), row["sync"], strict=True))
    fields |= dict(zip(("precision", "reduce_dtype"), row["dtypes"], strict=True))
    return Case(**fields, transport=row["place"].transport)


def text(row: Row) -> str:
    """The row in a line: the place, the zero level, and the values that differ from PLAIN."""
    place, differing = row["place"], [str(row[name]) for name in row if name != "place" and row[name] != PLAIN[name]]
    return f"{place.size} ranks {place.kind} zero{row['zero']} {' '.join(differing)}"


# ---- what is legal


def is_legal(row: Row) -> bool:
    """Whether the row means something, the library accepts it, and an oracle can compute it."""
    case, place = case_of(row), row["place"]
    if any(applies(case, place) for applies in (MEANINGLESS | WITHOUT_ORACLE).values()):
        return False
    return not is_refused(dataclasses.replace(case, loss="values", batch_sizes=UNEVEN), place)


MEANINGLESS: dict[str, Callable[[Case, Place], bool]] = {
    "a mesh of another size than the world": lambda case, place: place.size % (case.cp * case.tp) > 0,
    "a context axis or length for a model without tokens": lambda case, _: (
        case.model != "lm" and (case.cp > 1 or case.length != LENGTH)
    ),
    "a task with another loss than its own": lambda case, _: case.model == "digits" and case.loss != "values",
    "a batch whose targets are all ignored": lambda case, _: case.loss == "masked" and not _has_counted_targets(case),
    "local SGD that ends between two averages": lambda case, _: (
        case.sync == "local" and len(case.batch_sizes) % case.local_steps > 0
    ),
    'unused parameters, which unused = "error" refuses in the step': lambda case, _: (
        case.model == "unused" and case.unused == "error"
    ),
    "a mean over unequal shards of a sequence": lambda case, _: (
        case.loss == "scalar" and case.cp > 1 and case.length != LENGTH
    ),
    "a context axis over process groups, which threads do not have": lambda case, place: (
        case.cp > 1 and (place.kind == "group" or case.cp * case.tp > place.size // place.hosts)
    ),
    "a tensor axis for a model without rules": lambda case, _: case.tp > 1 and case.model not in cases.TENSOR_RULES,
    "a shard group that straddles hosts": lambda case, place: place.hosts > 1 and _straddles(case, place),
}
WITHOUT_ORACLE: dict[str, Callable[[Case, Place], bool]] = {
    "the codec oracle splits batches by sample only": lambda case, _: case.codec != "none" and case.cp > 1,
    "a codec with other dtypes": lambda case, _: (
        case.codec != "none" and (case.precision, case.reduce_dtype) != ("keep", "keep")
    ),
    "casts whose sums are rounded in another order": lambda case, place: (
        case.codec in ("bf16", "fp16")
        and (case.batch_sizes != SIXTEENS or place.kind != "shared" or _in_thirds(case, place))
    ),
    "casts of losses whose count changes from step to step": lambda case, _: (
        case.codec in ("bf16", "fp16") and (case.loss == "masked" or case.length != LENGTH)
    ),
    "a codec with parameters that get no gradient": lambda case, _: case.codec != "none" and case.model == "unused",
    "low precision on the tensor axis, which adds rounded partial sums": lambda case, _: (
        case.precision != "keep" and case.tp > 1
    ),
    "local SGD with another dtype of reduction": lambda case, _: case.sync == "local" and case.reduce_dtype != "keep",
    "low precision with models, losses and batches that its oracle does not know": lambda case, _: (
        case.precision != "keep"
        and (case.model not in ("mlp", "tied", "frozen") or case.loss != "values" or case.batch_sizes != TWELVES)
    ),
    "low precision with microbatches of unequal size": lambda case, place: (
        case.precision != "keep" and TWELVES[0] % (place.size * case.microbatches) > 0
    ),
    "sums rounded in another order, with an update that magnifies the difference": lambda case, place: (
        case.precision != "keep" and _reorders(case, place) and case.optimizer in ("AdamW", "Adagrad")
    ),
    "sums in float32, with an update that magnifies the difference": lambda case, _: (
        (case.precision, case.reduce_dtype) == ("keep", "fp32") and case.optimizer not in ("SGD", "descent")
    ),
    "a checkpointed region recomputed in one pass, whose reads are reported twice": lambda case, _: (
        case.model == "checkpointed" and case.microbatches == 1 and case.zero < 3
    ),
}


def _reorders(case: Case, place: Place) -> bool:
    """Whether the ranks' gradients are added in another order than that of the ranks."""
    is_all_reduce = place.kind == "group" and case.zero == 0 and place.size > 2
    return place.hosts > 1 or case.shard is not None or is_all_reduce


def _in_thirds(case: Case, place: Place) -> bool:
    return place.size == 3 or case.microbatches == 3


def _straddles(case: Case, place: Place) -> bool:
    group_size = (case.shard or place.size // (case.cp * case.tp)) * case.cp
    per_host = max(place.size // place.hosts // case.tp, 1)
    return case.zero > 0 and group_size % per_host > 0 and per_host % group_size > 0


@functools.cache
def _has_counted_targets(case: Case) -> bool:
    return _each_batch_counts(case.model == "lm", case.batch_sizes, case.length)


@functools.cache
def _each_batch_counts(has_tokens: bool, batch_sizes: tuple[int, ...], length: int) -> bool:
    case = Case(model="lm" if has_tokens else "mlp", batch_sizes=batch_sizes, length=length)
    return all((targets < 6).any() for _, targets in cases.batches(case))


@functools.cache
def is_refused(case: Case, place: Place) -> bool:
    """Whether the library refuses the plan before training."""
    comm = cast(Any, SimpleNamespace(size=place.size, device=torch.device("cpu")))
    try:
        plan, model = case.plan(place.size), _model(case.model)
        check_plan_on_ranks(model, plan, comm, clip=case.clip)
        place_shards(model, cases.TENSOR_RULES.get(case.model, {}), plan.tensor_spec)
        if case.update == "in_backward" or case.tp > 1:
            check_update_timing(user_optimizer.build_optimizer(cases.optimizer(case), list(model.parameters())), plan)
    except PlanError:
        return True
    return False


_model = functools.cache(cases.model)

# ---- pairs of values that never go together


def _all_but(name: str, *values: Any) -> tuple[Any, ...]:
    return tuple(value for value in CHOICES[name] if value not in values)


def _places(is_such: Callable[[Place], bool]) -> tuple[Place, ...]:
    return tuple(filter(is_such, PLACES))


_CODECS, _CASTS, _LOCAL_SGD = _all_but("codec", "none"), ("bf16", "fp16"), _all_but("sync", STEP)
_DTYPES = _all_but("dtypes", ("keep", "keep"))
_LOW_PRECISION = tuple(numbers for numbers in _DTYPES if numbers[0] != "keep")
_SPLIT, _SPLIT_IN_4 = SEQUENCES[1:], SEQUENCES[-2:]
_TENSOR = TENSOR_SIZES[1:]
NEVER: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...]]] = [
    ("place", _places(lambda place: place.size % 2 > 0), "shard", (2,)),
    ("place", _places(lambda place: place.kind == "group" or place.size % 2 > 0), "sequence", _SPLIT),
    ("place", _places(lambda place: place.size // place.hosts < 4), "sequence", _SPLIT_IN_4),
    ("place", _places(lambda place: place.kind != "shared" or place.size == 3), "codec", _CASTS),
    ("place", _places(lambda place: place.size % 2 > 0), "tp", _TENSOR),
    ("place", _places(lambda place: place.size % 4 > 0), "tp", (4,)),
    ("zero", (3,), "codec", _CODECS),
    ("zero", (1, 2, 3), "sync", _LOCAL_SGD),
    ("update", ("in_backward",), "model", ("unused",)),
    ("update", ("in_backward",), "clip", (0.05,)),
    ("update", ("in_backward",), "unused", ("allow",)),
    ("update", ("in_forward",), "sync", _LOCAL_SGD),
    ("update", ("in_backward",), "dtypes", (("fp16", "fp32"),)),
    ("shard", (2,), "sequence", _SPLIT_IN_4),
    ("shard", (2,), "tp", (4,)),
    ("model", tuple(AWKWARD_MODELS), "tp", _TENSOR),
    ("sequence", _SPLIT, "tp", (4,)),
    ("sequence", tuple(each for each in SEQUENCES if each[2] > 1), "tp", _TENSOR),  # two heads of keys and values
    ("tp", _TENSOR, "dtypes", _LOW_PRECISION),
    ("model", ("digits",), "loss", _all_but("loss", "values")),
    ("model", _all_but("model", "lm"), "length", (ODD_LENGTH,)),
    ("model", _all_but("model", "lm"), "sequence", _SPLIT),
    ("model", ("unused",), "unused", ("error",)),
    ("model", ("unused", "complex"), "codec", _CODECS),
    ("model", ("unused",), "sync", _LOCAL_SGD),
    ("model", _all_but("model", "mlp", "tied", "frozen"), "dtypes", _LOW_PRECISION),
    ("loss", ("masked",), "codec", _CASTS),
    ("loss", _all_but("loss", "values"), "dtypes", _LOW_PRECISION),
    ("optimizer", _all_but("optimizer", "SGD", "descent"), "dtypes", (("keep", "fp32"),)),
    ("batch_sizes", _all_but("batch_sizes", SIXTEENS), "codec", _CASTS),
    ("batch_sizes", (TINY, TWELVES), "sync", _LOCAL_SGD[1:]),
    ("batch_sizes", _all_but("batch_sizes", TWELVES), "dtypes", _LOW_PRECISION),
    ("length", (ODD_LENGTH,), "codec", _CASTS),
    ("length", (ODD_LENGTH,), "dtypes", _LOW_PRECISION),
    ("sequence", _SPLIT, "codec", _CODECS),
    ("sequence", _SPLIT, "sync", _LOCAL_SGD),
    ("sequence", _SPLIT, "dtypes", _LOW_PRECISION),
    ("microbatches", (3,), "codec", _CASTS),
    ("unused", ("allow",), "codec", _all_but("codec", "none", *_CASTS)),
    ("unused", ("allow",), "sync", _LOCAL_SGD),
    ("codec", _CODECS, "sync", _LOCAL_SGD),
    ("codec", _CODECS, "dtypes", _DTYPES),
    ("sync", _LOCAL_SGD, "dtypes", _DTYPES),
    ("sync", _LOCAL_SGD, "offload", ("states",)),
]


@functools.cache
def never() -> frozenset[pairs.Part]:
    return frozenset(part for a, some, b, others in NEVER for part in pairs.parts({a: some, b: others}, (a, b)))


def triples() -> list[pairs.Part]:
    """All triples of zero level, time of update and transport."""
    return pairs.parts(CHOICES | {"place": PLACES[:3]}, ("zero", "update", "place"))


@functools.cache
def drawn() -> pairs.Cover:
    """Trainings with all pairs of values, and all triples of zero level, time of update and transport."""
    return pairs.cover(CHOICES, is_legal, BASES, first=triples(), never=never())


# ---- the expected result


def train(case: Case, place: Place) -> list[TrainingResult]:
    """The result of every rank."""
    if case.precision != "keep":
        return threads.run(
            place.size,
            lambda r: precision_oracle.train_steps(precision_oracle.make_step(case, place.size, r), case),
            hosts=place.hosts,
        )

    def body(comm: threads.ThreadCommunicator) -> TrainingResult:
        return cases.train_step(case, cases.build_step(case, place.size, comm))

    return threads.run(place.size, body, hosts=place.hosts)


def expected(case: Case, place: Place) -> TrainingResult:
    """The result of one process. Of the plan it gets only the fields that change the result."""
    changes = {"update": "after", "unused": "error", "offload": "none", "shard": None, "transport": "auto"}
    changes |= {"cp": 1, "tp": 1, "ulysses": 1, "ring": "zigzag"}
    if case.sync == "local":
        return _local_sgd(dataclasses.replace(case, **changes, microbatches=1), place.size // case.tp)
    if case.precision != "keep":
        return _low_precision(dataclasses.replace(case, **changes), place.size)
    if case.codec != "none":
        # If every rank holds all gradients, they are reduced once a step.
        changes["zero"] = case.zero if case.plan(place.size).num_shards > 1 else 0
        return _codec(dataclasses.replace(case, **changes), place.size // case.tp, case.tp)
    plain = {name: getattr(case, name) for name in ("model", "loss", "optimizer", "batch_sizes", "clip", "length")}
    return _oracle(Case(**plain))


_local_sgd, _low_precision, _oracle = map(
    functools.cache, (local_sgd_oracle.train, precision_oracle.train_oracle, cases.train_oracle)
)


@functools.cache
def _codec(case: Case, size: int, tp: int) -> TrainingResult:
    count = case.batch_sizes[0] * (case.length if case.model == "lm" else 1)
    return codec_oracle.train(case, size, tp=tp, unit=float(count))


def deviation(case: Case, place: Place, got: TrainingResult) -> float:
    """The largest |a − b| / max(1, |b|) over the result; in low precision, over the master weights."""
    wanted = expected(case, place)
    if case.precision != "keep":
        trained = {name: value for name, value in got.weights.items() if value.dtype == torch.float32}
        got = TrainingResult([], [], trained)
        wanted = TrainingResult(
            [], [], {name: wanted.weights.get(name, wanted.weights["second.weight"]) for name in trained}
        )
    return oracle.deviation(got, wanted)


def tolerance(case: Case, place: Place) -> float:
    """The largest deviation allowed; 0.0: equal bit for bit."""
    if case.precision == "keep":
        return TOLERANCE if case.reduce_dtype == "keep" else 1e-6
    if case.precision == "fp16":
        return 1e-4 if case.optimizer in ("SGD", "descent", "LARS") else 2e-3
    if _reorders(case, place):
        return 1e-6 if case.reduce_dtype == "fp32" else 1e-3
    return 1e-6 if case.clip is not None or case.optimizer in precision_oracle.LAYER_WISE else 0.0
