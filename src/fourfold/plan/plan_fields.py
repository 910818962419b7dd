"""Plan fields: what each field of a plan may hold and means, and every problem of a set of values.

Law: a value that passes `plan_problems` is legal whatever the model and the machine are.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fourfold.axes.context.rules.layout import RINGS, ulysses_problem
from fourfold.axes.pipeline.rules.division import stages_problems
from fourfold.axes.pipeline.rules.edges import DEFAULT_DENSITY, EDGES
from fourfold.axes.pipeline.rules.schedules import SCHEDULES
from fourfold.axes.tensor.rules.dims import dims_problems
from fourfold.plan.codec import CODECS
from fourfold.plan.precision import COMPUTE_FORMATS, REDUCE_FORMATS
from fourfold.words.errors import Problem, closest_match
from fourfold.words.field import PARSERS, Field, declare, declared_fields, to_builtin

MAX_RANKS = 2**20  # ranks or microbatches; beyond any machine, and a plan can still be shown
COUNT = {"minimum": 1, "maximum": MAX_RANKS}  # a program has an entry for each, so the number is bounded


@dataclass(frozen=True, kw_only=True)
class PlanFields:
    """The fields of a plan. All scalars; a text without choices is checked by itself: see `plan_problems`.

    The help is Markdown, with links that count from docs/plan.md.
    """

    pp: int = declare(1, **COUNT, help="[pipeline axis](pipeline-axis.md): splits layers")
    dp: int = declare(1, **COUNT, help="data axis: splits samples")
    cp: int = declare(1, **COUNT, help="context axis: splits tokens ([context parallelism](context-axis.md))")
    tp: int = declare(1, **COUNT, help="[tensor axis](tensor-axis.md): splits weight matrices, heads and vocabulary")
    dims: str = declare(
        "",
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
        help="[order of microbatches](pipeline-axis.md#schedules) in the pipeline; no effect with `pp = 1`",
    )
    stages: str = declare(
        "even",
        help='[blocks of each stage](pipeline-axis.md#stages): `"3,2,2,1"`, or `"net1; relu net2"`; no effect with '
        "`pp = 1`",
    )
    interleave: int = declare(1, **COUNT, help="number of stages per pipeline rank; no effect with `pp = 1`")
    max_in_flight: int | None = declare(
        None,
        **COUNT,
        help='with `schedule = "zero-bubble"`: how many microbatches a stage may hold activations of; none means '
        "`pp`, as in 1F1B",
    )
    program: str = declare(
        "",
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
        help="[compression](pipeline-axis.md#compressed-edges) of what stages send each other; needs `pp > 1`",
    )
    edge_density: float = declare(
        DEFAULT_DENSITY, above=0, maximum=1.0, help='with `edge = "dct"`: fraction of each row that is sent'
    )
    ring: str = declare(
        "zigzag",
        choices=RINGS,
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
        help="`step`: reduce gradients in every step; `local`: [local steps](local-steps.md)",
    )
    local_steps: int = declare(10, minimum=1, help='with `sync = "local"`: number of steps between two averagings')
    outer_lr: float = declare(
        1.0,
        above=0,
        maximum=10.0,
        help='with `sync = "local"`: how far weights move towards the average; 1 is all the way',
    )
    outer_momentum: float = declare(
        0.0, minimum=0, maximum=0.999, help='with `sync = "local"`: Nesterov momentum of these outer steps'
    )
    codec: str = declare("none", choices=("none", *CODECS), help="gradient compression ([codecs](codecs.md))")
    codec_rank: int = declare(4, minimum=1, help="number of columns in the factors of `powersgd`")
    codec_density: float = declare(0.01, above=0, maximum=1.0, help="fraction of elements that `topk` and `dct` send")
    codec_refresh_steps: int = declare(
        100, minimum=1, help="number of reductions of a bucket for which `dct` keeps its threshold"
    )
    offload: str = declare(
        "none",
        choices=("none", "states"),
        help="what is stored in host memory ([precision](precision.md#states-in-host-memory))",
    )
    precision: str = declare(
        "keep",
        choices=("keep", *COMPUTE_FORMATS),
        help="dtype of forward and backward; `keep` is that of the model ([precision](precision.md))",
    )
    reduce_dtype: str = declare(
        "keep",
        choices=("keep", *REDUCE_FORMATS),
        help="dtype in which gradients are summed; `keep` is that of the weights",
    )
    batch_norm: str = declare(
        "error",
        choices=("error", "local", "sync"),
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


PLAN_FIELDS: dict[str, Field] = declared_fields(PlanFields)
FIELDS = tuple(PLAN_FIELDS)


def plan_problems(values: Mapping[str, object]) -> list[Problem]:
    """Every problem of a mapping of plan fields: unknown names, illegal values, values that are not built yet."""
    values = {name: to_builtin(value) for name, value in values.items()}
    problems: list[Problem] = []
    for name, value in values.items():
        rule = PLAN_FIELDS.get(name)
        if rule is None:
            close = closest_match(name, FIELDS)
            problems.append(Problem(f"{name} = {value!r}", "a field of the plan", close or "fourfold show"))
        elif not rule.accepts(value):
            choices = [choice for choice in rule.supported or rule.choices if isinstance(choice, str)]
            close = closest_match(value, choices) if isinstance(value, str) else None
            problems.append(Problem(f"{name} = {value!r}", rule.requirement(), f"{name} = {close}" if close else ""))
        elif rule.supported is not None and value not in rule.supported:
            built = " or ".join(map(str, rule.supported))
            need = f"{built} (other values are not implemented yet)"
            problems.append(Problem(f"{name} = {value}", need, f"{name} = {built}"))
    cp, ulysses = values.get("cp", 1), values.get("ulysses", 1)
    if (
        isinstance(cp, int)
        and isinstance(ulysses, int)
        and PLAN_FIELDS["ulysses"].accepts(ulysses)
        and PLAN_FIELDS["cp"].accepts(cp)
    ):
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
        return PARSERS.get(rule.type, str)(text)
    except (ValueError, OverflowError):
        return text
