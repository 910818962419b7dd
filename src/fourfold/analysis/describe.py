"""Show: what a plan will do with a task, as text: the plan, the buckets, each rank's program, the bytes it sends.

Law: nothing here is measured or guessed; every figure is arithmetic on the plan and the model's shapes.
"""

from collections.abc import Mapping, Sequence

from fourfold.analysis.describe_sequence import format_sequence
from fourfold.parts import mixed_precision
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.optim.user_optimizer import build_optimizer, is_layerwise, num_state_tensors
from fourfold.plan.codec import codec_rounds, codec_sent_bytes
from fourfold.plan.data.buckets import Bucket, effective_bucket_bytes, make_buckets
from fourfold.plan.data.step_program import DataStepSpec, StepSync, lower_step
from fourfold.plan.data.zero import RESTING_LAYOUTS, layout_changes, step_sent_bytes
from fourfold.plan.memory import (
    BucketBytes,
    HostMemoryUse,
    HostRanks,
    bytes_per_element,
    has_unbucketed_grads,
    host_memory_use,
)
from fourfold.plan.plan import Plan
from fourfold.plan.precision import REDUCE_FORMATS, compute_specs, gradient_bucket, has_master_weights
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.meta_model import build_meta_model
from fourfold.step.model_checks import check_plan_for_model, check_update_timing
from fourfold.words import program as program_module
from fourfold.words.layout import SPLIT, Change
from fourfold.words.layout import collective_sent_bytes as layout_bytes
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Verb
from fourfold.words.task import Task, check_task
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes

MEASURE_TEXTS = {
    LOSS: "sum the loss and the counts over the data ranks",
    GRAD_NORM: "sum the gradient norm over the data ranks",
    TRUST_NORMS: "sum the norms of every parameter's weight and direction over the data ranks",
    USED_PARAMS: "learn which parameters got a gradient on any data rank",
}
VERB_TEXTS = {
    Verb.FORWARD: "forward of a microbatch",
    Verb.BACKWARD: "backward of a microbatch",
    Verb.REDUCE: "sum a bucket's gradient over the data ranks; begun while backward runs, in this order",
    Verb.UPDATE: "update a bucket's weights, or this rank's share of them",
    Verb.GATHER: "bring the shares of a bucket's weights to all data ranks",
    Verb.PUSH: "add how far a bucket's weights have come on this rank to those of all data ranks",
    Verb.PULL: "go an outer step along the mean of all data ranks: weights are the same again",
}


def show(plan: Plan, task: Task) -> str:
    """The text of `fourfold show`. Raises PlanError or OptimizerError for what cannot be carried out."""
    check_task(task)
    check_plan_argument(plan)
    model = build_meta_model(task)
    check_plan_for_model(model, plan, clip=task.clip)
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    check_update_timing(optimizer, plan)
    group_of = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
    own = param_specs(trainable, {name: group_of[id(p)] for name, p in trainable.items()})
    specs = compute_specs(own, plan.precision, excluded=mixed_precision.full_precision_params(model))
    rest = RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]
    bucket_bytes = effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=plan.codec != "none")
    buckets = make_buckets(
        specs, bucket_bytes=bucket_bytes, num_shards=plan.reduce_group_size if rest.state == SPLIT else 1
    )
    trust = is_layerwise(optimizer) and rest.state == SPLIT
    measured = task.clip is not None or plan.precision == "fp16"
    outlined = DataStepSpec(
        plan.microbatches,
        len(buckets),
        rest,
        has_clip=measured,
        allows_unused=plan.unused == "allow",
        update=plan.update,
        has_trust_ratios=trust,
    )
    messages = _codec_sent_bytes(buckets, plan, {name: tuple(p.shape) for name, p in trainable.items()})
    programs = [_format_program(_program_by_rank(plan, outlined))]
    if plan.sync == "local":
        programs = [
            _format_program(
                _program_by_rank(plan, outlined._replace(sync=StepSync.NOTHING)),
                "no rank hears of another one's gradients",
            ),
            _format_program(
                _program_by_rank(plan, outlined._replace(sync=StepSync.WEIGHTS)),
                f"in every {_format_ordinal(plan.local_steps)} step",
            ),
        ]
    tokens = [format_sequence(plan, task, model)] if plan.sp > 1 else []
    kinds = [num_state_tensors(optimizer, group) for group in range(len(optimizer.param_groups))]
    of = bytes_per_element(
        buckets, plan, num_states=kinds, original_bytes={spec.name: spec.element_bytes for spec in own}
    )
    sections = [
        _format_plan(plan),
        _format_buckets(buckets, plan),
        *tokens,
        *programs,
        _format_bytes(buckets, plan, messages),
    ]
    sections.append(_format_memory(of, plan))
    return "\n\n".join(sections)


def _program_by_rank(plan: Plan, step: DataStepSpec) -> program_module.Program:
    return dict.fromkeys(range(plan.mesh.size), lower_step(step))


def _format_plan(plan: Plan) -> str:
    mesh = plan.mesh
    axes = f"pp {mesh.pp} × dp {mesh.dp} × sp {mesh.sp} × tp {mesh.tp}"
    notes = {name: f"   no effect without {need}" for name, need in plan.ineffective_fields.items()}
    fields = [line + notes.get(line.split(" = ")[0], "") for line in plan.to_toml().splitlines()[1:]]
    return f"plan   {axes} = {mesh.size} {_plural('rank', mesh.size)}\n" + _indent(fields)


def _format_buckets(buckets: Sequence[Bucket], plan: Plan) -> str:
    rows = [("bucket", "parameters", "elements", "size", "dtype", "first", "last")]
    rows += [
        (
            str(bucket.index),
            str(len(bucket.slots)),
            f"{bucket.size:,}",
            format_bytes(bucket.num_bytes),
            bucket.dtype,
            bucket.slots[0].name,
            bucket.slots[-1].name,
        )
        for bucket in buckets
    ]
    rest, number = RESTING_LAYOUTS[plan.zero], REDUCE_FORMATS.get(plan.reduce_dtype)
    changes = {
        name.replace("_", " "): change
        for name, change in layout_changes(rest)._asdict().items()
        if change != Change.NONE
    }
    replicas = plan.reduce_group_size // plan.num_shards if plan.zero else 1
    onward = f", then an all-reduce of the share over {replicas} replicas" if replicas > 1 else ""
    among = f" over {plan.num_shards} ranks each" if replicas > 1 else ""
    lines = [
        f"weights rest {rest.weight}, gradients {rest.gradient}, optimizer states {rest.state}{among}",
        *(
            f"{moment}: {change}{onward if change == Change.REDUCE_SCATTER else ''}"
            + (", in forward and again in backward" if moment == "before use" else "")
            for moment, change in changes.items()
        ),
    ]
    if any(has_master_weights(bucket, plan.precision) for bucket in buckets):
        lines.append(f"the update has {plan.precision} weights in float32 too, beside its states: {rest.state}")
    if number is not None:
        lines.append(f"gradients are summed in {number.dtype}")
    if plan.sync == "local":
        often = f"all-reduce of the weights in every {_format_ordinal(plan.local_steps)} step"
        lines = [f"weights, gradients and optimizer states rest whole, each rank's own; {often}"]
    return "buckets   filled in reverse order of definition\n" + _format_table(rows, left=4) + "\n" + _indent(lines)


def _format_program(program: program_module.Program, note: str = "") -> str:
    ranks = sorted(program)
    same = [rank for rank in ranks if program[rank] == program[ranks[0]]]
    head = f"program   {_plural('rank', len(ranks))} {ranks[0]}" + (
        f" to {ranks[-1]}, all the same" if len(ranks) > 1 else ""
    )
    head += f"; {note}" if note else ""
    assert len(same) == len(ranks)
    legend = []
    for verb, index in dict.fromkeys((a.verb, a.index if a.verb == Verb.MEASURE else None) for a in program[ranks[0]]):
        word = f"M0.{index}" if verb == Verb.MEASURE else f"{verb.value}0.k"
        legend.append((word, VERB_TEXTS.get(verb) or MEASURE_TEXTS[index or 0]))
    num_buckets = sum(a.verb == Verb.UPDATE for a in program[ranks[0]])
    if any(a.verb == Verb.REDUCE and a.index >= num_buckets for a in program[ranks[0]]):
        legend.append(("", f"reductions are numbered by microbatch × {num_buckets} + bucket"))
    lines = _wrap([str(a) for a in program[ranks[0]]])
    return "\n".join([head, _indent(lines), *("  " + f"{word:<5}  {text}" for word, text in legend)])


def _codec_sent_bytes(buckets: Sequence[Bucket], plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
    """Bytes a rank sends in a step as messages of a codec, and as weights; None without a codec. Raises PlanError."""
    if plan.codec_spec is None:
        return None
    sent = 0.0
    for bucket in buckets:
        said = codec_rounds(
            plan.codec_spec, gradient_bucket(bucket, plan.reduce_dtype), [shapes[slot.name] for slot in bucket.slots]
        )
        sent += codec_sent_bytes(said, size=plan.reduce_group_size) * (plan.microbatches if plan.zero == 2 else 1)
        weights = layout_changes(RESTING_LAYOUTS[plan.zero]).after_update
        sent += layout_bytes(weights, whole_bytes=bucket.num_bytes, size=plan.reduce_group_size)
    return sent


def _format_ratio(coded: float, plain: float) -> str:
    if coded <= plain:
        return f"{plain / coded:.3g} times less than without the codec"
    return f"{coded / plain:.3g} times as much as without the codec"


def _format_bytes(buckets: Sequence[Bucket], plan: Plan, messages: float | None) -> str:
    gradients = [gradient_bucket(bucket, plan.reduce_dtype) for bucket in buckets]
    total = sum(bucket.num_bytes for bucket in gradients)
    sent = step_sent_bytes(
        buckets,
        zero=plan.zero,
        shard_groups=plan.shard_groups,
        microbatches=plan.microbatches,
        gradient_buckets=gradients,
    )
    lines = [f"gradients         {format_bytes(total)} a rank"]
    if plan.reduce_group_size > 1 and messages is not None:
        lines += [
            f"over a network    {format_bytes(messages)} sent by each rank in each step, "
            f"{_format_ratio(messages, sent)}",
            "in shared memory  nothing is sent, and gradients are coded all the same: training is that of a network",
        ]
    elif plan.reduce_group_size > 1 and plan.sync == "local":
        lines += [
            f"over a network    {format_bytes(sent / plan.sync_interval)} sent by each rank in each step on average, "
            f"{format_bytes(sent)} in every {_format_ordinal(plan.local_steps)}",
            "in shared memory  nothing is sent: ranks of one host read each other's weights where they lie",
        ]
    elif plan.reduce_group_size > 1:
        times = sent / (total * (plan.reduce_group_size - 1) / plan.reduce_group_size)
        theirs = "gradients and weights" if plan.zero == 3 else "gradients"
        lines += [
            f"over a network    {format_bytes(sent)} sent by each rank in each step, "
            f"{times:g} (N − 1) / N of the gradients",
            f"in shared memory  nothing is sent: ranks of one host read each other's {theirs} where they lie",
        ]
    else:
        lines.append("one data rank: nothing is sent")
    return "bytes\n" + _indent(lines)


def _format_memory(of: Sequence[BucketBytes], plan: Plan) -> str:
    size = plan.reduce_group_size
    if size == 1:
        places = {"one rank": HostRanks(1, plan.shard_groups, has_shared_memory=False)}
    else:
        places = {
            f"a host of {size} ranks": HostRanks(size, plan.shard_groups, has_shared_memory=True),
            f"a rank on a network of {size}": HostRanks(1, plan.shard_groups, has_shared_memory=False),
        }
    held = {place: host_memory_use(of, zero=plan.zero, host=host) for place, host in places.items()}
    names = [name for name in HostMemoryUse._fields if any(getattr(each, name) for each in held.values())]
    rows = [(*names, "in all", "")]
    rows += [(*(format_bytes(getattr(h, n)) for n in names), format_bytes(h.total), place) for place, h in held.items()]
    lines = [_format_table(rows, left=len(names) + 1)]
    if has_unbucketed_grads(plan):
        lines.append(_indent(["gradients lie where autograd leaves them, each until it has been used"]))
    if plan.codec != "none":
        lines.append(_indent(["and what the codec remembers"]))
    return "\n".join(["memory   what is there from step to step; activations are not", *lines])


def _format_ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


def _indent(lines: Sequence[str]) -> str:
    return "\n".join("  " + line for line in lines)


def _wrap(words: Sequence[str], width: int = 100) -> list[str]:
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]


def _format_table(rows: Sequence[tuple[str, ...]], *, left: int) -> str:
    """Columns from `left` on are set to the left, those before to the right."""
    return _indent(align_columns(rows, ">" * left + "<" * (len(rows[0]) - left)))
