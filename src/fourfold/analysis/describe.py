"""Describe: what a plan will do with a task, as text: the plan, the buckets, the programs, bytes sent, memory.

Law: nothing here is measured or guessed; every number is arithmetic on the plan and the model's shapes.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from fourfold.analysis.describe_sequence import format_sequence
from fourfold.parts import mixed_precision
from fourfold.parts.data.flat_params import param_specs
from fourfold.parts.optim.user_optimizer import build_optimizer, is_layerwise, num_state_tensors
from fourfold.plan.codec import codec_rounds, codec_sent_bytes
from fourfold.plan.data.buckets import Bucket, effective_bucket_bytes, make_buckets
from fourfold.plan.data.step_program import DataStepSpec, StepSync, lower_step
from fourfold.plan.data.zero import RESTING_LAYOUTS, layout_changes, step_sent_bytes
from fourfold.plan.memory import (
    HostMemoryUse,
    HostRanks,
    bytes_per_element,
    has_unbucketed_grads,
    host_memory_use,
)
from fourfold.plan.param_spec import ParamSpec
from fourfold.plan.plan import Plan
from fourfold.plan.precision import REDUCE_FORMATS, compute_specs, gradient_bucket, has_master_weights
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.meta_model import build_meta_model
from fourfold.step.model_checks import check_plan_for_model, check_update_timing
from fourfold.words.layout import SPLIT, Change, collective_sent_bytes
from fourfold.words.program import GRAD_NORM, LOSS, TRUST_NORMS, USED_PARAMS, Action, Verb
from fourfold.words.task import Task, check_task
from fourfold.words.text_table import align_columns
from fourfold.words.units import format_bytes

MEASURE_TEXTS = {
    LOSS: "sum the loss and the counts over the data ranks",
    GRAD_NORM: "sum the gradient norm over the data ranks",
    TRUST_NORMS: "sum the norms of every parameter's weight and direction over the data ranks",
    USED_PARAMS: "find which parameters have a gradient on any data rank",
}
VERB_TEXTS = {
    Verb.FORWARD: "forward of a microbatch",
    Verb.BACKWARD: "backward of a microbatch",
    Verb.REDUCE: "sum a bucket's gradient over the data ranks; begun while backward runs, in this order",
    Verb.UPDATE: "update a bucket's weights, or this rank's shard of them",
    Verb.GATHER: "all-gather the shards of a bucket's weights",
    Verb.PUSH: "add the change of a bucket's weights on this rank to the sum over the data ranks",
    Verb.PULL: "take an outer step along the mean change: all data ranks have the same weights again",
}


class _StepLayout(NamedTuple):
    """How a plan lays the step of a task's model over the mesh.

    param_specs  of the trainable parameters, in the dtypes that the model has
    shapes       of the trainable parameters
    num_states   tensors of optimizer state per parameter, by optimizer group
    """

    param_specs: Sequence[ParamSpec]
    shapes: Mapping[str, tuple[int, ...]]
    buckets: Sequence[Bucket]
    step: DataStepSpec
    num_states: Sequence[int]


def show(plan: Plan, task: Task) -> str:
    """The text of `fourfold show`. Raises PlanError or OptimizerError for what cannot be carried out."""
    check_task(task)
    check_plan_argument(plan)
    model = build_meta_model(task)
    check_plan_for_model(model, plan, clip=task.clip)
    layout = _lay_out(plan, task, model)
    sections = [_format_plan(plan), _format_buckets(layout.buckets, plan)]
    if plan.sp > 1:
        sections.append(format_sequence(plan, task, model))
    sections += _format_programs(plan, layout.step)
    sections.append(_format_bytes(layout.buckets, plan, _codec_sent_bytes(layout.buckets, plan, layout.shapes)))
    sections.append(_format_memory(layout, plan))
    return "\n\n".join(sections)


def _lay_out(plan: Plan, task: Task, model: nn.Module) -> _StepLayout:
    """Raises PlanError or OptimizerError."""
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    check_update_timing(optimizer, plan)
    groups = optimizer.param_groups
    group_of = {id(p): index for index, group in enumerate(groups) for p in group["params"]}
    stored = param_specs(trainable, {name: group_of[id(p)] for name, p in trainable.items()})
    specs = compute_specs(stored, plan.precision, excluded=mixed_precision.full_precision_params(model))
    resting = RESTING_LAYOUTS[plan.zero if plan.num_shards > 1 else 0]
    buckets = make_buckets(
        specs,
        bucket_bytes=effective_bucket_bytes(specs, plan.bucket_bytes, is_inter_host=plan.codec != "none"),
        num_shards=plan.reduce_group_size if resting.state == SPLIT else 1,
    )
    step = DataStepSpec(
        plan.microbatches,
        len(buckets),
        resting,
        has_clip=task.clip is not None or plan.precision == "fp16",
        allows_unused=plan.unused == "allow",
        update=plan.update,
        has_trust_ratios=is_layerwise(optimizer) and resting.state == SPLIT,
    )
    shapes = {name: tuple(p.shape) for name, p in trainable.items()}
    num_states = [num_state_tensors(optimizer, index) for index in range(len(groups))]
    return _StepLayout(stored, shapes, buckets, step, num_states)


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
    lines = [*align_columns(rows, ">>>><<<"), *_layout_lines(buckets, plan)]
    return "buckets   filled in reverse order of definition\n" + _indent(lines)


def _layout_lines(buckets: Sequence[Bucket], plan: Plan) -> list[str]:
    """Where tensors rest, and the collectives that follow from it."""
    if plan.sync == "local":
        average = f"all-reduce of the weights in every {_format_ordinal(plan.local_steps)} step"
        return [f"weights, gradients and optimizer states rest whole, each rank its own; {average}"]
    resting, reduce_format = RESTING_LAYOUTS[plan.zero], REDUCE_FORMATS.get(plan.reduce_dtype)
    replicas = plan.reduce_group_size // plan.num_shards if plan.zero else 1
    over = f" over {plan.num_shards} ranks each" if replicas > 1 else ""
    lines = [f"weights rest {resting.weight}, gradients {resting.gradient}, optimizer states {resting.state}{over}"]
    for name, change in layout_changes(resting)._asdict().items():
        if change != Change.NONE:
            then = ", in forward and again in backward" if name == "before_use" else ""
            if change == Change.REDUCE_SCATTER and replicas > 1:
                then += f", then an all-reduce of the shard over {replicas} replicas"
            lines.append(f"{name.replace('_', ' ')}: {change}{then}")
    if any(has_master_weights(bucket, plan.precision) for bucket in buckets):
        lines.append(f"the update keeps {plan.precision} weights in float32 as well: {resting.state}")
    if reduce_format is not None:
        lines.append(f"gradients are summed in {reduce_format.dtype}")
    return lines


def _format_programs(plan: Plan, step: DataStepSpec) -> list[str]:
    """The program of a step; with local steps, that of a step without and that of one with an average of weights."""
    if plan.sync != "local":
        return [_format_program(plan, step)]
    often = f"in every {_format_ordinal(plan.local_steps)} step"
    return [
        _format_program(plan, step._replace(sync=StepSync.NOTHING), "ranks do not communicate gradients"),
        _format_program(plan, step._replace(sync=StepSync.WEIGHTS), often),
    ]


def _format_program(plan: Plan, step: DataStepSpec, note: str = "") -> str:
    size, actions = plan.mesh.size, lower_step(step)
    head = f"program   {_plural('rank', size)} 0" + (f" to {size - 1}, all the same" if size > 1 else "")
    lines = [f"{head}; {note}" if note else head, _indent(_wrap([str(action) for action in actions]))]
    return "\n".join([*lines, *(f"  {word:<5}  {text}" for word, text in _legend(actions))])


def _legend(actions: Sequence[Action]) -> list[tuple[str, str]]:
    """What the actions of a program mean: (word, text)."""
    legend = []
    for verb, index in dict.fromkeys((a.verb, a.index if a.verb == Verb.MEASURE else None) for a in actions):
        word = f"M0.{index}" if verb == Verb.MEASURE else f"{verb.value}0.k"
        legend.append((word, VERB_TEXTS.get(verb) or MEASURE_TEXTS[index or 0]))
    num_buckets = sum(a.verb == Verb.UPDATE for a in actions)
    if any(a.verb == Verb.REDUCE and a.index >= num_buckets for a in actions):
        legend.append(("", f"reductions are numbered by microbatch × {num_buckets} + bucket"))
    return legend


def _codec_sent_bytes(buckets: Sequence[Bucket], plan: Plan, shapes: Mapping[str, tuple[int, ...]]) -> float | None:
    """Bytes a rank sends in a step, as a codec's messages and as weights; None without a codec. Raises PlanError."""
    if plan.codec_spec is None:
        return None
    weight_change = layout_changes(RESTING_LAYOUTS[plan.zero]).after_update
    num_rounds = plan.microbatches if plan.zero == 2 else 1
    sent = 0.0
    for bucket in buckets:
        slot_shapes = [shapes[slot.name] for slot in bucket.slots]
        rounds = codec_rounds(plan.codec_spec, gradient_bucket(bucket, plan.reduce_dtype), slot_shapes)
        sent += codec_sent_bytes(rounds, size=plan.reduce_group_size) * num_rounds
        sent += collective_sent_bytes(weight_change, whole_bytes=bucket.num_bytes, size=plan.reduce_group_size)
    return sent


def _format_bytes(buckets: Sequence[Bucket], plan: Plan, codec_bytes: float | None) -> str:
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
    if plan.reduce_group_size == 1:
        return "bytes\n" + _indent([*lines, "one data rank: nothing is sent"])
    if codec_bytes is not None:
        network = f"{format_bytes(codec_bytes)} sent by each rank in each step, {_format_ratio(codec_bytes, sent)}"
        shared = "nothing is sent, and gradients are encoded too: training is the same as over a network"
    elif plan.sync == "local":
        network = f"{format_bytes(sent / plan.sync_interval)} sent by each rank in each step on average, "
        network += f"{format_bytes(sent)} in every {_format_ordinal(plan.local_steps)}"
        shared = "nothing is sent: ranks of one host read each other's weights where they lie"
    else:
        times = sent / (total * (plan.reduce_group_size - 1) / plan.reduce_group_size)
        network = f"{format_bytes(sent)} sent by each rank in each step, {times:g} (N − 1) / N of the gradients"
        what = "gradients and weights" if plan.zero == 3 else "gradients"
        shared = f"nothing is sent: ranks of one host read each other's {what} where they lie"
    return "bytes\n" + _indent([*lines, f"over a network    {network}", f"in shared memory  {shared}"])


def _format_ratio(codec_bytes: float, plain_bytes: float) -> str:
    if codec_bytes <= plain_bytes:
        return f"{plain_bytes / codec_bytes:.3g} times less than without the codec"
    return f"{codec_bytes / plain_bytes:.3g} times as much as without the codec"


def _format_memory(layout: _StepLayout, plan: Plan) -> str:
    size = plan.reduce_group_size
    if size == 1:
        hosts = {"one rank": HostRanks(1, plan.shard_groups, has_shared_memory=False)}
    else:
        hosts = {
            f"a host of {size} ranks": HostRanks(size, plan.shard_groups, has_shared_memory=True),
            f"a rank on a network of {size}": HostRanks(1, plan.shard_groups, has_shared_memory=False),
        }
    original_bytes = {spec.name: spec.element_bytes for spec in layout.param_specs}
    by_bucket = bytes_per_element(layout.buckets, plan, num_states=layout.num_states, original_bytes=original_bytes)
    uses = {name: host_memory_use(by_bucket, zero=plan.zero, host=host) for name, host in hosts.items()}
    kinds = [kind for kind in HostMemoryUse._fields if any(getattr(use, kind) for use in uses.values())]
    rows = [(*kinds, "in all", "")]
    rows += [(*(format_bytes(getattr(u, k)) for k in kinds), format_bytes(u.total), name) for name, u in uses.items()]
    lines = align_columns(rows, ">" * (len(kinds) + 1) + "<")
    if has_unbucketed_grads(plan):
        lines.append("gradients lie where autograd puts them, each until the update has used it")
    if plan.codec != "none":
        lines.append("the state of the codec is not counted")
    return "memory   what is there from step to step, without activations\n" + _indent(lines)


def _format_ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def _plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


def _indent(lines: Sequence[str]) -> str:
    return "\n".join("  " + line for line in lines)


def _wrap(words: Sequence[str], width: int = 100) -> list[str]:
    """The words in lines of at most `width` characters."""
    lines, line = [], ""
    for word in words:
        if line and len(line) + 1 + len(word) > width:
            lines.append(line)
            line = ""
        line = f"{line} {word}".strip()
    return [*lines, line]
