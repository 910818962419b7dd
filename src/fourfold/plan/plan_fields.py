"""Plan fields: what each field of a plan may hold and means, and every problem of a set of values.

Law: a value that passes `plan_problems` is legal whatever the model and the machine are.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from fourfold.axes.context.rules.layout import RINGS, ulysses_problem
from fourfold.axes.pipeline.rules.division import stages_problems
from fourfold.axes.pipeline.rules.edges import DEFAULT_DENSITY, EDGES
from fourfold.axes.pipeline.rules.schedules import SCHEDULES
from fourfold.axes.tensor.rules.dims import dims_problems
from fourfold.plan.codec import CODECS, CodecSpec
from fourfold.plan.precision import COMPUTE_FORMATS, REDUCE_FORMATS
from fourfold.words.argument_checks import is_int
from fourfold.words.errors import Problem, closest_match, setting_elsewhere
from fourfold.words.field import Field, declare, declared_fields, to_builtin

MAX_RANKS = 2**20  # ranks or microbatches; beyond any machine, and a plan can still be shown
COUNT = {"minimum": 1, "maximum": MAX_RANKS}  # a program has an entry for each, so the number is bounded


class Needs(NamedTuple):
    """What a plan needs for a field to have an effect: as a text, and whether a plan has it."""

    text: str
    holds: Callable[[Any], bool]


@dataclass(frozen=True, kw_only=True)
class PlanField(Field):
    """A field of a plan.

    needs        for it to have an effect; None: nothing
    in_identity  of plans with which it changes what is trained, and not only how the same weights are computed
    """

    needs: Needs | None = None
    in_identity: Callable[[Any], bool] = lambda plan: False


def _with_codec(name: str) -> dict[str, Any]:
    """What a field of codecs needs: one that reads it."""
    kinds = [kind for kind, row in CODECS.items() if name in row.fields]
    text = "codec = " + " or ".join(f'"{kind}"' for kind in kinds)
    return {"needs": Needs(text, lambda plan: plan.codec in kinds), "in_identity": lambda plan: plan.codec != "none"}


PIPELINED = Needs("pp above 1", lambda plan: plan.pp > 1)
LOCAL: dict[str, Any] = {  # every rank then trains on its own between averages, so their number matters too
    "needs": Needs('sync = "local"', lambda plan: plan.sync == "local"),
    "in_identity": lambda plan: plan.sync == "local",
}


def _differs_from_keep(name: str) -> Callable[[Any], bool]:
    return lambda plan: getattr(plan, name) != "keep"


def _has_edges(plan: Any) -> bool:
    """Whether what stages send is rounded or masked: that depends on where the boundaries of stages are."""
    return plan.edge != "none"


@dataclass(frozen=True, kw_only=True)
class PlanFields:
    """The fields of a plan. All scalars; a text without choices is checked by itself: see `plan_problems`.

    The help is Markdown, with links that count from docs/plan.md.
    """

    pp: int = declare(
        1,
        **COUNT,
        in_identity=lambda plan: plan.is_asynchronous or _has_edges(plan),
        help="[pipeline axis](pipeline-axis.md): splits layers",
    )
    dp: int = declare(1, **COUNT, in_identity=LOCAL["in_identity"], help="data axis: splits samples")
    cp: int = declare(1, **COUNT, help="context axis: splits tokens ([context parallelism](context-axis.md))")
    tp: int = declare(1, **COUNT, help="[tensor axis](tensor-axis.md): splits weight matrices, heads and vocabulary")
    dims: str = declare(
        "",
        needs=Needs("tp above 1", lambda plan: plan.tp > 1),
        help='which [named dims](tensor-axis.md#named-dims) of the weights `tp` splits, such as `"heads:tp mlp:tp"`; '
        "none means those that the rules mark. No effect with `tp = 1`",
    )
    shard: int | None = declare(
        None, **COUNT, help="number of data ranks over which `zero` shards, a divisor of `dp` ([below](#sharding))"
    )
    zero: int = declare(0, choices=(0, 1, 2, 3), help="the ZeRO stage ([below](#sharding))")
    microbatches: int = declare(
        1, **COUNT, help="number of microbatches per step: gradient accumulation ([below](#microbatches))"
    )
    schedule: str = declare(
        "1f1b",
        choices=tuple(SCHEDULES),
        needs=PIPELINED,
        in_identity=lambda plan: plan.is_asynchronous,
        help="[order of microbatches](pipeline-axis.md#schedules) in the pipeline; no effect with `pp = 1`",
    )
    stages: str = declare(
        "even",
        needs=PIPELINED,
        in_identity=_has_edges,
        help='[blocks of each stage](pipeline-axis.md#stages): `"3,2,2,1"`, or `"net1; relu net2"`; no effect with '
        "`pp = 1`",
    )
    interleave: int = declare(
        1,
        **COUNT,
        needs=PIPELINED,
        in_identity=_has_edges,
        help="number of stages per pipeline rank; no effect with `pp = 1`",
    )
    max_in_flight: int | None = declare(
        None,
        **COUNT,
        needs=PIPELINED,
        help='with `schedule = "zero-bubble"`: how many microbatches a stage may hold activations of; none means '
        "`pp`, as in 1F1B",
    )
    program: str = declare(
        "",
        needs=Needs('schedule = "written"', lambda plan: plan.pp > 1 and plan.schedule == "written"),
        help='with `schedule = "written"`: the [order of microbatches](pipeline-axis.md#written-programs), a line for '
        "each pipeline rank; on the command line a file",
    )
    recompute: str = declare(
        "none",
        choices=("none", "selective", "full"),
        help="which activations [backward recomputes](pipeline-axis.md#recompute)",
    )
    edge: str = declare(
        "none",
        choices=EDGES,
        in_identity=_has_edges,
        help="[compression](pipeline-axis.md#compressed-edges) of what stages send each other; needs `pp > 1`",
    )
    edge_density: float = declare(
        DEFAULT_DENSITY,
        above=0,
        maximum=1.0,
        needs=Needs('edge = "dct"', lambda plan: plan.edge == "dct"),
        in_identity=lambda plan: plan.edge == "dct",
        help='with `edge = "dct"`: fraction of each row that is sent',
    )
    ring: str = declare(
        "zigzag",
        choices=RINGS,
        needs=Needs("cp above ulysses", lambda plan: plan.cp > plan.ulysses),
        help="the variant of [ring attention](context-axis.md#which-variant); no effect with `cp = 1` or `ulysses = "
        "cp`",
    )
    ulysses: int = declare(
        1,
        **COUNT,
        help="number of neighbouring `cp` ranks, a divisor of `cp`, that exchange tokens for heads; the ring then has "
        "`cp / ulysses` places",
    )
    sequence_parallel: bool = declare(
        False,
        help="whether each tensor rank computes norms and residual additions for its part of the tokens only "
        "([sequence parallelism](tensor-axis.md#sequence-parallelism)); needs `tp > 1`",
    )
    update: str = declare(
        "after",
        choices=("after", "in_backward", "in_forward"),
        help="when weights are updated ([data axis](data-axis.md#when-buckets-are-updated))",
    )
    sync: str = declare(
        "step",
        choices=("step", "local", "server"),
        supported=("step", "local"),
        in_identity=LOCAL["in_identity"],
        help="`step`: reduce gradients in every step; `local`: [local steps](local-steps.md)",
    )
    local_steps: int = declare(
        10, minimum=1, **LOCAL, help='with `sync = "local"`: number of steps between two averagings'
    )
    outer_lr: float = declare(
        1.0,
        above=0,
        maximum=10.0,
        **LOCAL,
        help='with `sync = "local"`: how far weights move towards the average; 1 is all the way',
    )
    outer_momentum: float = declare(
        0.0, minimum=0, maximum=0.999, **LOCAL, help='with `sync = "local"`: Nesterov momentum of these outer steps'
    )
    codec: str = declare(
        "none",
        choices=("none", *CODECS),
        in_identity=lambda plan: plan.codec != "none",
        help="gradient compression ([codecs](codecs.md))",
    )
    codec_rank: int = declare(
        CodecSpec.matrix_rank,
        minimum=1,
        **_with_codec("codec_rank"),
        help="number of columns in the factors of `powersgd`",
    )
    codec_density: float = declare(
        CodecSpec.density,
        above=0,
        maximum=1.0,
        **_with_codec("codec_density"),
        help="fraction of elements that `topk` and `dct` send",
    )
    codec_refresh_steps: int = declare(
        CodecSpec.refresh_steps,
        minimum=1,
        **_with_codec("codec_refresh_steps"),
        help="number of reductions of a bucket for which `dct` keeps its threshold",
    )
    offload: str = declare(
        "none",
        choices=("none", "states"),
        help="what is stored in host memory ([precision](precision.md#states-in-host-memory))",
    )
    precision: str = declare(
        "keep",
        choices=("keep", *COMPUTE_FORMATS),
        in_identity=_differs_from_keep("precision"),
        help="dtype of forward and backward; `keep` is that of the model ([precision](precision.md))",
    )
    reduce_dtype: str = declare(
        "keep",
        choices=("keep", *REDUCE_FORMATS),
        in_identity=_differs_from_keep("reduce_dtype"),
        help="dtype in which gradients are summed; `keep` is that of the weights",
    )
    batch_norm: str = declare(
        "error",
        choices=("error", "local", "sync"),
        in_identity=lambda plan: plan.batch_norm == "local",
        help="batch norm when a batch is split ([below](#batch-norm-and-unused-parameters))",
    )
    unused: str = declare(
        "error",
        choices=("error", "allow"),
        help="trainable parameters without a gradient ([below](#batch-norm-and-unused-parameters))",
    )
    bucket_bytes: int = declare(
        4 * 2**20, minimum=1, help="maximum size of a bucket of gradients ([below](#buckets-and-transport))"
    )
    transport: str = declare(
        "auto",
        choices=("auto", "shared", "gloo", "nccl"),
        help="how ranks communicate ([below](#buckets-and-transport))",
    )


PLAN_FIELDS: dict[str, PlanField] = declared_fields(PlanFields, PlanField)
FIELDS = tuple(PLAN_FIELDS)


def plan_problems(values: Mapping[str, object]) -> list[Problem]:
    """Every problem of a mapping of plan fields: unknown names, illegal values, values that are not built yet."""
    values = {name: to_builtin(value) for name, value in values.items()}
    problems: list[Problem] = []
    for name, value in values.items():
        rule = PLAN_FIELDS.get(name)
        if rule is None:
            close = setting_elsewhere(name, FIELDS) or closest_match(name, FIELDS)
            problems.append(Problem(f"{name} = {value!r}", "a field of the plan", close or "fourfold show"))
        elif not rule.accepts(value) or rule.supported is not None:  # most are legal, of many thousands of plans
            problems += rule.problems(name, value, none="none")
    cp, ulysses = values.get("cp", 1), values.get("ulysses", 1)
    if is_int(cp) and is_int(ulysses) and PLAN_FIELDS["cp"].accepts(cp) and PLAN_FIELDS["ulysses"].accepts(ulysses):
        problem = ulysses_problem(cp, ulysses)
        problems += [] if problem is None else [problem]
    if isinstance(dims := values.get("dims"), str):
        problems += dims_problems(dims)
    if isinstance(stages := values.get("stages"), str):
        problems += stages_problems(stages)
    return problems or _too_many_ranks(values) or shard_problems(values)


def _too_many_ranks(values: Mapping[str, Any]) -> list[Problem]:
    size = math.prod(values.get(axis, 1) for axis in ("pp", "dp", "cp", "tp"))
    return [] if size <= MAX_RANKS else [Problem(f"{size} ranks: pp × dp × cp × tp", f"at most {MAX_RANKS}")]


def shard_problems(values: Mapping[str, Any]) -> list[Problem]:
    """The problems of `shard`: groups of that many ranks must divide the data ranks, and something must be split."""
    shard, size = values.get("shard"), values.get("dp", 1)
    if shard is None:
        return []
    problems = []
    if size % shard:
        sizes = ", ".join(str(divisor) for divisor in range(1, size + 1) if size % divisor == 0)
        problems.append(Problem(f"shard = {shard} with dp = {size}", "a divisor of dp", f"shard = {sizes}"))
    if shard < size and not values.get("zero", 0):
        need = "zero of at least 1: with zero = 0 nothing is sharded"
        problems.append(Problem(f"shard = {shard} with zero = 0", need, "zero = 1, or no shard"))
    return problems


def parse_value(name: str, text: str) -> object:
    """The value of a plan field given as `key=value` on a command line; what is no value stays a text."""
    rule = PLAN_FIELDS[name]
    if rule.is_optional and text == "none":
        return None
    try:
        return rule.kind.parse(text)
    except (ValueError, OverflowError):
        return text
