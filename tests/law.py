"""The law of training, drawn: what may differ between two trainings, what is legal together, and who knows the result.

place    how many ranks, on how many hosts, and what carries tensors between them
oracle   one process, in plain torch: see tests/{apart,coded,precision}.py and fourfold.testing.oracle
Law: what is legal is asked of the library; what is legal and no oracle knows is listed, with the reason.
"""

import dataclasses
import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple, cast

import torch

from fourfold.parts.optim.user_optimizer import build_optimizer
from fourfold.plan.plan_fields import FIELD_RULES
from fourfold.plan.sequence import RINGS
from fourfold.step.model_checks import check_plan_on_ranks, check_update_timing
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE, TrainingResult
from fourfold.words.errors import PlanError
from tests import cases, codec_oracle, local_sgd_oracle, pairs, precision_oracle
from tests.awkward_models import AWKWARD_MODELS
from tests.cases import Case
from tests.pairs import Row


class Place(NamedTuple):
    """How many ranks there are, on how many hosts, and what carries tensors between them."""

    size: int
    hosts: int = 1
    transport: str = "by-host"

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
SCARCE, UNEVEN, TWELVES, SIXTEENS = (1, 9, 2), (12, 9, 13, 7), (12,) * 3, (16,) * 2
LENGTH, ODD_LENGTH = 16, 11
Sequence = tuple[int, str, int]  # sp, ring, ulysses
SEQUENCES: tuple[Sequence, ...] = (
    (1, "zigzag", 1),
    *((2, ring, 1) for ring in RINGS),
    (2, "zigzag", 2),
    (4, "zigzag", 2),
    (4, "plain", 2),
)
STEP = ("step", 10, 1.0, 0.0)  # sync, local steps, rate and momentum of the outer update
CHOICES: dict[str, tuple[Any, ...]] = {
    "place": PLACES,
    "zero": FIELD_RULES["zero"].choices,
    "update": FIELD_RULES["update"].choices,
    "shard": (None, 1, 2),
    "model": ("mlp", "tied", "frozen", "unused", "lm", "digits", *AWKWARD_MODELS),
    "loss": tuple(cases.LOSSES),
    "optimizer": ("AdamW", "SGD", "LAMB", "LARS", "Adagrad", "descent"),
    "batch_sizes": (SCARCE, UNEVEN, TWELVES, SIXTEENS),
    "length": (LENGTH, ODD_LENGTH),
    "sequence": SEQUENCES,
    "microbatches": (1, 2, 3),
    "clip": (None, 0.05),
    "bucket_bytes": (1500, 1, 2**20),
    "unused": FIELD_RULES["unused"].choices,
    "codec": FIELD_RULES["codec"].choices,
    "sync": (STEP, ("local", 1, 0.7, 0.0), ("local", 2, 1.0, 0.9)),
    "numbers": (("keep", "keep"), ("keep", "fp32"), ("bf16", "keep"), ("bf16", "fp32"), ("fp16", "fp32")),
    "offload": FIELD_RULES["offload"].choices,
}
PLAIN: Row = {name: values[0] for name, values in CHOICES.items()} | {"place": Place(2), "zero": 1}
OF_TOKENS = PLAIN | {"model": "lm", "sequence": (2, "zigzag", 1)}
BASES = (
    PLAIN,
    PLAIN | {"model": "tied", "zero": 3, "loss": "pair"},
    PLAIN | {"model": "unused", "unused": "allow"},
    OF_TOKENS,
    OF_TOKENS | {"sequence": (4, "zigzag", 2), "place": Place(4, transport="shared")},
    PLAIN | {"codec": "topk"},
    PLAIN | {"codec": "bf16", "batch_sizes": SIXTEENS},
    PLAIN | {"sync": ("local", 2, 1.0, 0.9), "zero": 0, "batch_sizes": UNEVEN},
    PLAIN | {"numbers": ("bf16", "keep"), "optimizer": "SGD", "batch_sizes": TWELVES},
    PLAIN | {"numbers": ("keep", "fp32"), "optimizer": "SGD"},
)


def case_of(row: Row) -> Case:
    fields = {name: row[name] for name in row if name not in ("place", "sequence", "sync", "numbers")}
    fields |= dict(zip(("sp", "ring", "ulysses"), row["sequence"], strict=True))
    fields |= dict(zip(("sync", "local_steps", "outer_lr", "outer_momentum"), row["sync"], strict=True))
    fields |= dict(zip(("precision", "reduce_dtype"), row["numbers"], strict=True))
    return Case(**fields, transport=row["place"].transport)


def text(row: Row) -> str:
    """The row in a line, without what is as it is in plain cases."""
    place, said = row["place"], [str(row[name]) for name in row if name != "place" and row[name] != PLAIN[name]]
    return f"{place.size} ranks {place.kind} zero{row['zero']} {' '.join(said)}"


# ---- what is legal


def is_legal(row: Row) -> bool:
    """Whether there is such a training, the library takes it, and an oracle knows what it leaves."""
    case, place = case_of(row), row["place"]
    if any(has(case, place) for has in (NOTHING | WITHOUT_ORACLE).values()):
        return False
    return not is_refused(dataclasses.replace(case, loss="values", batch_sizes=UNEVEN), place)


NOTHING: dict[str, Callable[[Case, Place], bool]] = {
    "a mesh that the ranks do not make": lambda case, place: place.size % case.sp > 0,
    "tokens of a model without any": lambda case, _: case.model != "lm" and (case.sp > 1 or case.length != LENGTH),
    "another loss than the task's own": lambda case, _: case.model == "digits" and case.loss != "values",
    "a batch without a target that counts": lambda case, _: case.loss == "masked" and not _all_count(case),
    "a training that ends between meetings": lambda case, _: (
        case.sync == "local" and len(case.batch_sizes) % case.local_steps > 0
    ),
    "unused parameters that are refused in the step": lambda case, _: (
        case.model == "unused" and case.unused == "refuse"
    ),
    "a mean over unequal parts of a sequence": lambda case, _: (
        case.loss == "scalar" and case.sp > 1 and case.length != LENGTH
    ),
    "a sequence over groups, which need processes": lambda case, place: (
        case.sp > 1 and (place.kind == "group" or case.sp > place.size // place.hosts)
    ),
    "a share that cuts hosts apart": lambda case, place: place.hosts > 1 and _cuts(case, place),
}
WITHOUT_ORACLE: dict[str, Callable[[Case, Place], bool]] = {
    "workers of a codec have whole samples": lambda case, _: case.codec != "none" and case.sp > 1,
    "a codec's messages of gradients in other numbers": lambda case, _: (
        case.codec != "none" and (case.precision, case.reduce_dtype) != ("keep", "keep")
    ),
    "casts round what is added in another order": lambda case, place: (
        case.codec in ("bf16", "fp16")
        and (case.batch_sizes != SIXTEENS or place.kind != "shared" or _in_thirds(case, place))
    ),
    "casts by a unit that is the first step's count": lambda case, _: (
        case.codec in ("bf16", "fp16") and (case.loss == "masked" or case.length != LENGTH)
    ),
    "what workers of a codec leave of parameters without gradients": lambda case, _: (
        case.codec != "none" and case.model == "unused"
    ),
    "local steps with other numbers": lambda case, _: case.sync == "local" and case.reduce_dtype != "keep",
    "rounded copies of other models, losses and batches": lambda case, _: (
        case.precision != "keep"
        and (case.model not in ("mlp", "tied", "frozen") or case.loss != "values" or case.batch_sizes != TWELVES)
    ),
    "rounded gradients of unequal parts": lambda case, place: (
        case.precision != "keep" and TWELVES[0] % (place.size * case.microbatches) > 0
    ),
    "rounded sums in another order under an update that magnifies": lambda case, place: (
        case.precision != "keep" and _reorders(case, place) and case.optimizer in ("AdamW", "Adagrad")
    ),
    "sums in float32 under an update that magnifies": lambda case, _: (
        (case.precision, case.reduce_dtype) == ("keep", "fp32") and case.optimizer not in ("SGD", "descent")
    ),
    "one region is told of twice": lambda case, _: (
        case.model == "checkpointed" and case.microbatches == 1 and case.zero < 3
    ),
}


def _reorders(case: Case, place: Place) -> bool:
    """Whether rounded sums are added up in another order than that of the ranks."""
    return place.hosts > 1 or case.shard is not None


def _in_thirds(case: Case, place: Place) -> bool:
    return place.size == 3 or case.microbatches == 3


def _cuts(case: Case, place: Place) -> bool:
    share = (case.shard or place.size // case.sp) * case.sp
    each = place.size // place.hosts
    return case.zero > 0 and share % each > 0 and each % share > 0


@functools.cache
def _all_count(case: Case) -> bool:
    return _counts(case.model == "lm", case.batch_sizes, case.length)


@functools.cache
def _counts(of_tokens: bool, batch_sizes: tuple[int, ...], length: int) -> bool:
    case = Case(model="lm" if of_tokens else "mlp", batch_sizes=batch_sizes, length=length)
    return all((targets < 6).any() for _, targets in cases.batches(case))


@functools.cache
def is_refused(case: Case, place: Place) -> bool:
    """Whether the library says no before anything is started."""
    ranks = cast(Any, SimpleNamespace(size=place.size, device=torch.device("cpu")))
    try:
        plan, model = case.plan(place.size), _model(case.model)
        check_plan_on_ranks(model, plan, ranks, clip=case.clip)
        if case.update == "in_backward":
            check_update_timing(build_optimizer(cases.optimizer(case), list(model.parameters())), plan)
    except PlanError:
        return True
    return False


_model = functools.cache(cases.model)

# ---- what never goes together: the values of one field, and those of another


def _but(name: str, *values: Any) -> tuple[Any, ...]:
    return tuple(value for value in CHOICES[name] if value not in values)


def _places(is_such: Callable[[Place], bool]) -> tuple[Place, ...]:
    return tuple(filter(is_such, PLACES))


_CODECS, _CASTS, _MEETING = _but("codec", "none"), ("bf16", "fp16"), _but("sync", STEP)
_NUMBERS = _but("numbers", ("keep", "keep"))
_ROUNDED = tuple(numbers for numbers in _NUMBERS if numbers[0] != "keep")
_CUT, _IN_FOURS = SEQUENCES[1:], SEQUENCES[-2:]
NEVER: list[tuple[str, tuple[Any, ...], str, tuple[Any, ...]]] = [
    ("place", _places(lambda place: place.size % 2 > 0), "shard", (2,)),
    ("place", _places(lambda place: place.kind == "group" or place.size % 2 > 0), "sequence", _CUT),
    ("place", _places(lambda place: place.size // place.hosts < 4), "sequence", _IN_FOURS),
    ("place", _places(lambda place: place.kind != "shared" or place.size == 3), "codec", _CASTS),
    ("zero", (3,), "codec", _CODECS),
    ("zero", (1, 2, 3), "sync", _MEETING),
    ("update", ("in_backward",), "model", ("unused",)),
    ("update", ("in_backward",), "clip", (0.05,)),
    ("update", ("in_backward",), "unused", ("allow",)),
    ("update", ("in_forward",), "sync", _MEETING),
    ("update", ("in_backward",), "numbers", (("fp16", "fp32"),)),
    ("shard", (2,), "sequence", _IN_FOURS),
    ("model", ("digits",), "loss", _but("loss", "values")),
    ("model", _but("model", "lm"), "length", (ODD_LENGTH,)),
    ("model", _but("model", "lm"), "sequence", _CUT),
    ("model", ("unused",), "unused", ("refuse",)),
    ("model", ("unused", "complex"), "codec", _CODECS),
    ("model", ("unused",), "sync", _MEETING),
    ("model", _but("model", "mlp", "tied", "frozen"), "numbers", _ROUNDED),
    ("loss", ("masked",), "codec", _CASTS),
    ("loss", _but("loss", "values"), "numbers", _ROUNDED),
    ("optimizer", _but("optimizer", "SGD", "descent"), "numbers", (("keep", "fp32"),)),
    ("batch_sizes", _but("batch_sizes", SIXTEENS), "codec", _CASTS),
    ("batch_sizes", (SCARCE, TWELVES), "sync", _MEETING[1:]),
    ("batch_sizes", _but("batch_sizes", TWELVES), "numbers", _ROUNDED),
    ("length", (ODD_LENGTH,), "codec", _CASTS),
    ("length", (ODD_LENGTH,), "numbers", _ROUNDED),
    ("sequence", _CUT, "codec", _CODECS),
    ("sequence", _CUT, "sync", _MEETING),
    ("sequence", _CUT, "numbers", _ROUNDED),
    ("microbatches", (3,), "codec", _CASTS),
    ("unused", ("allow",), "codec", _but("codec", "none", *_CASTS)),
    ("unused", ("allow",), "sync", _MEETING),
    ("codec", _CODECS, "sync", _MEETING),
    ("codec", _CODECS, "numbers", _NUMBERS),
    ("sync", _MEETING, "numbers", _NUMBERS),
    ("sync", _MEETING, "offload", ("states",)),
]


@functools.cache
def never() -> frozenset[pairs.Part]:
    return frozenset(part for a, some, b, others in NEVER for part in pairs.parts({a: some, b: others}, (a, b)))


def triples() -> list[pairs.Part]:
    """Zero levels, moments of updates, and what carries tensors."""
    return pairs.parts(CHOICES | {"place": PLACES[:3]}, ("zero", "update", "place"))


@functools.cache
def drawn() -> pairs.Cover:
    """Trainings with all pairs of values, and all triples of a zero level, a moment of updates and what carries."""
    return pairs.cover(CHOICES, is_legal, BASES, first=triples(), never=never())


# ---- what it must leave


def train(case: Case, place: Place) -> list[TrainingResult]:
    """What every rank has at the end."""
    if case.precision != "keep":
        return threads.run(
            place.size,
            lambda r: precision_oracle.train_steps(precision_oracle.make_step(case, place.size, r), case),
            hosts=place.hosts,
        )

    def body(ranks: threads.ThreadCommunicator) -> TrainingResult:
        return cases.train_step(case, cases.build_step(case, place.size, ranks))

    return threads.run(place.size, body, hosts=place.hosts)


def expected(case: Case, place: Place) -> TrainingResult:
    """What one process leaves. Of the plan it is told what makes another training of it."""
    told = {"update": "after", "unused": "refuse", "offload": "none", "shard": None, "transport": "by-host"}
    told |= {"sp": 1, "ulysses": 1, "ring": "zigzag"}
    if case.sync == "local":
        return _apart(dataclasses.replace(case, **told, microbatches=1), place.size)
    if case.precision != "keep":
        return _by_hand(dataclasses.replace(case, **told), place.size)
    if case.codec != "none":
        # Where all gradients rest on every rank, they are reduced once a step.
        told["zero"] = case.zero if case.plan(place.size).num_shards > 1 else 0
        return _coded(dataclasses.replace(case, **told), place.size)
    plain = {name: getattr(case, name) for name in ("model", "loss", "optimizer", "batch_sizes", "clip", "length")}
    return _oracle(Case(**plain))


_apart, _by_hand, _oracle = map(
    functools.cache, (local_sgd_oracle.train, precision_oracle.train_oracle, cases.train_oracle)
)


@functools.cache
def _coded(case: Case, size: int) -> TrainingResult:
    count = case.batch_sizes[0] * (case.length if case.model == "lm" else 1)
    return codec_oracle.train(case, size, unit=float(count))


def far(case: Case, place: Place, got: TrainingResult) -> float:
    """The largest |a − b| / max(1, |b|); where copies are rounded, of the weights that are updated."""
    wanted = expected(case, place)
    if case.precision != "keep":
        trained = {name: value for name, value in got.weights.items() if value.dtype == torch.float32}
        got = TrainingResult([], [], trained)
        wanted = TrainingResult(
            [], [], {name: wanted.weights.get(name, wanted.weights["second.weight"]) for name in trained}
        )
    return oracle.deviation(got, wanted)


def tolerance(case: Case, place: Place) -> float:
    """How far that may be; 0.0: bit for bit."""
    if case.precision == "keep":
        return TOLERANCE if case.reduce_dtype == "keep" else 1e-6
    if case.precision == "fp16":
        return 1e-4 if case.optimizer in ("SGD", "descent", "LARS") else 2e-3
    if _reorders(case, place):
        return 1e-6 if case.reduce_dtype == "fp32" else 1e-3
    return 1e-6 if case.clip is not None or case.optimizer in precision_oracle.LAYER_WISE else 0.0
