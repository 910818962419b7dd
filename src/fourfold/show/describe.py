"""Describe: what a plan will do with a task, as text: the plan, the buckets, the programs, bytes sent, memory.

place  an index on the pipeline axis
Law: nothing here is measured or guessed; every number is arithmetic on the plan and the model's shapes. Stages differ,
so each place has numbers of its own for its memory; of its tensor ranks, the one that holds most counts. The blocks
that backward computes again are those of a step (`step/recomputed_blocks.py`).
Law: ranks with equal programs are shown once; what `fourfold.words.program` prints is what a step runs.
"""

import dataclasses
from collections.abc import Mapping, Sequence

from torch import nn

from fourfold.axes.context.show import format_context
from fourfold.axes.data.rules.buckets import Bucket
from fourfold.axes.data.rules.zero import RESTING_LAYOUTS, layout_changes
from fourfold.axes.pipeline.show import format_pipeline
from fourfold.axes.pipeline.work.chain import map_stages
from fourfold.axes.tensor.show import format_tensor
from fourfold.model.batch_statistics import batch_norms, uses_batch_stats
from fourfold.model.weights import update_spec
from fourfold.optim.user_optimizer import build_optimizer
from fourfold.plan.batch_norm import statistics_sent_bytes
from fourfold.plan.lowering import Blueprint, StageBuckets, bytes_by_bucket, lower, stage_sent_bytes
from fourfold.plan.memory import HostMemoryUse, HostRanks, has_unbucketed_grads, host_memory_use
from fourfold.plan.plan import Plan
from fourfold.plan.precision import REDUCE_FORMATS, has_master_weights
from fourfold.plan.topology import Topology
from fourfold.step.argument_checks import check_plan_argument
from fourfold.step.initial_model import build_meta_model
from fourfold.step.model_checks import check_plan_for_model
from fourfold.step.model_layout import laid_out_specs
from fourfold.step.recomputed_blocks import recomputed_blocks
from fourfold.words.layout import Change
from fourfold.words.program import (
    GRAD_NORM,
    LOSS,
    NOMINAL_COUNT,
    TRUST_NORMS,
    USED_PARAMS,
    Action,
    Program,
    Verb,
)
from fourfold.words.task import Task, check_task
from fourfold.words.terminal_text import indent, table_lines, wrap
from fourfold.words.units import format_bytes

# ---- describe the programs of all ranks -----------------------------------------------------------------------------


MEASURE_TEXTS = {
    LOSS: "sum the loss and the counts over all ranks",
    GRAD_NORM: "sum the gradient norm over all ranks",
    TRUST_NORMS: "sum the norms of every parameter's weight and direction over the ranks that share it",
    USED_PARAMS: "find which parameters have a gradient on any data rank",
    NOMINAL_COUNT: "sum the count of the first microbatch over the data ranks",
}
VERB_TEXTS = {
    Verb.FORWARD: "forward of a microbatch",
    Verb.BACKWARD: "backward of a microbatch",
    Verb.BACKWARD_INPUT: "backward of a microbatch, without the gradients of weights",
    Verb.BACKWARD_WEIGHT: "the gradients of weights of a microbatch",
    Verb.SEND_FORWARD: "send a microbatch's activations to the next stage; does not wait",
    Verb.RECEIVE_FORWARD: "receive a microbatch's activations from the stage before",
    Verb.SEND_BACKWARD: "send the gradients of a microbatch's activations to the stage before; does not wait",
    Verb.RECEIVE_BACKWARD: "receive the gradients of a microbatch's activations from the next stage",
    Verb.REDUCE: "sum a bucket's gradient over the data ranks; started while backward runs, in this order",
    Verb.UPDATE: "update a bucket's weights, or this rank's shard of them",
    Verb.UNSHARD: "all-gather a bucket's weights before a use; started ahead of it, in this order",
    Verb.GATHER: "all-gather the shards of a bucket's weights",
    Verb.TIE: "copy the weights that the first stage owns and the last one uses too",
    Verb.TIE_GRADIENT: "add the gradients of these copies to those of the weights",
    Verb.PUSH: "add the change of a bucket's weights on this rank to the sum over the data ranks",
    Verb.PULL: "take an outer step along the mean change: all data ranks have the same weights again",
}


def format_programs(blueprints: Mapping[str, Blueprint]) -> list[str]:
    """A section for each kind of step. `blueprints` are of one plan, by how its ranks reach each other.

    The programs are shown once if that makes no difference.
    """
    by_place = {place: blueprint.programs() for place, blueprint in blueprints.items()}
    first_place, first = next(iter(by_place.items()))
    plan = blueprints[first_place].plan
    if plan.sync == "local":
        often = f"in every {format_ordinal(plan.local_steps)} step"
        notes = {"ranks do not communicate gradients": first.local_step, often: first.step}
    elif all(programs.step == first.step for programs in by_place.values()):
        notes = {"": first.step}
    else:
        notes = {place: programs.step for place, programs in by_place.items()}
    return [_format_program(program, plan, note) for note, program in notes.items()]


def _format_program(program: Program, plan: Plan, note: str) -> str:
    """The programs of all ranks, those of ranks with equal programs together."""
    ranks_of: dict[tuple[Action, ...], list[int]] = {}
    for rank, actions in program.items():
        ranks_of.setdefault(actions, []).append(rank)
    lines = [line for actions, ranks in ranks_of.items() for line in _format_actions(actions, ranks, plan, note)]
    legend = dict.fromkeys(row for actions in ranks_of for row in _legend(actions, has_stages=plan.pp > 1))
    return "\n".join([*lines, *(f"  {word:<5}  {text}" for word, text in legend)])


def _format_actions(actions: Sequence[Action], ranks: Sequence[int], plan: Plan, note: str) -> list[str]:
    head = f"program   {plural('rank', len(ranks))} {format_ranges(ranks)}"
    head += ", all the same" if len(ranks) == plan.mesh.size > 1 else ""
    return [f"{head}; {note}" if note else head, indent(wrap([str(action) for action in actions]))]


def format_ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges: "0 to 3, 8"."""
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join(" to ".join(map(str, each)) for each in ranges)


def _legend(actions: Sequence[Action], *, has_stages: bool) -> list[tuple[str, str]]:
    """What the actions of a program mean: (word, text). `has_stages`: their stages are called s."""
    legend = []
    for verb, stage, index in dict.fromkeys(
        (a.verb, a.stage, a.index if a.verb == Verb.MEASURE else None) for a in actions
    ):
        word = f"{verb.value}{'s' if has_stages else stage}.{'k' if index is None else index}"
        legend.append((word, VERB_TEXTS[verb] if index is None else MEASURE_TEXTS[index]))
    num_buckets = sum(a.verb == Verb.UPDATE for a in actions)
    if any(a.verb == Verb.REDUCE and a.index >= num_buckets for a in actions):
        legend.append(("", f"reductions are numbered by microbatch × {num_buckets} + bucket"))
    if any(a.verb == Verb.UNSHARD for a in actions):
        legend.append(("", f"unshards are numbered by {num_buckets} × earlier unshards of the bucket + bucket"))
        legend.append(("", "their order is that in which the model uses its weights, which the first step finds;"))
        legend.append(("", "here it is their order of definition"))
    return legend


def format_ordinal(number: int) -> str:
    ending = "th" if number // 10 % 10 == 1 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def plural(noun: str, count: int) -> str:
    return noun if count == 1 else noun + "s"


# ---- the plan --------------------------------------------------------------------------------------------------------


def show(plan: Plan, task: Task) -> str:
    """The text of `fourfold show`. Raises PlanError or OptimizerError for what cannot be carried out."""
    check_task(task)
    check_plan_argument(plan)
    model = build_meta_model(task)
    check_plan_for_model(model, plan, clip=task.clip)
    blueprints = _lower(plan, task, model)
    blueprint = next(iter(blueprints.values()))
    group = blueprint.groups[0]
    sections = [_format_plan(plan), _format_buckets(group.buckets, plan)]
    if plan.pp > 1:
        sections.insert(1, format_pipeline(model, blueprint))
    if plan.recompute != "none":
        sections.append(format_recompute(model, plan))
    if plan.tp > 1:
        sections.append(format_tensor(model, task.tensor, plan))
    if plan.cp > 1:
        sections.append(format_context(plan, task, model))
    sections += format_programs(blueprints)
    sections.append(_format_bytes(group.stage, plan) + _format_statistics(model, plan))
    sections.append(_format_memory(blueprints))
    return "\n\n".join(sections)


def _lower(plan: Plan, task: Task, model: nn.Module) -> dict[str, Blueprint]:
    """The plan on one host, by how its ranks reach each other. Raises PlanError or OptimizerError."""
    optimizer = build_optimizer(task.optimizer, list(model.parameters()))
    specs = laid_out_specs(model, optimizer, task.tensor, plan.tensor_spec, plan.stage_spec)
    update = update_spec(model, optimizer, clip=task.clip, counts_states=True)
    device = "cuda" if plan.transport == "nccl" else "cpu"
    one_host = Topology.regular(hosts=1, ranks_per_host=plan.mesh.size, device=device)
    blueprint = lower(plan, specs, one_host, update)
    if not blueprint.groups[0].hosts.shares_memory:
        return {NETWORK: blueprint}
    if plan.transport == "shared":
        return {SHARED_MEMORY: blueprint}
    private = dataclasses.replace(one_host, unshared_cause=NETWORK)
    return {SHARED_MEMORY: blueprint, NETWORK: lower(plan, specs, private, update)}


def _format_plan(plan: Plan) -> str:
    mesh = plan.mesh
    axes = f"pp {mesh.pp} × dp {mesh.dp} × cp {mesh.cp} × tp {mesh.tp}"
    notes = {name: f"   no effect without {need}" for name, need in plan.ineffective_fields.items()}
    fields = [line + notes.get(line.split(" = ")[0], "") for line in plan.to_toml().splitlines()[1:]]
    return f"plan   {axes} = {mesh.size} {plural('rank', mesh.size)}\n" + indent(fields)


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
    lines = [*table_lines(rows, ">>>><<<"), *_layout_lines(buckets, plan)]
    stage = " of the first stage" if plan.pp > 1 else ""
    return f"buckets{stage}   filled in reverse order of definition\n" + indent(lines)


def _layout_lines(buckets: Sequence[Bucket], plan: Plan) -> list[str]:
    """Where tensors rest, and the collectives that follow from it."""
    if plan.sync == "local":
        average = f"all-reduce of the weights in every {format_ordinal(plan.local_steps)} step"
        return [f"each rank stores its own whole weights, gradients and optimizer states; {average}"]
    resting, reduce_format = RESTING_LAYOUTS[plan.zero], REDUCE_FORMATS.get(plan.reduce_dtype)
    replicas = plan.reduce_group_size // plan.num_shards if plan.zero else 1
    over = f" over {plan.num_shards} ranks each" if replicas > 1 else ""
    lines = [f"stored: weights {resting.weight}, gradients {resting.gradient}, optimizer states {resting.state}{over}"]
    for name, change in layout_changes(resting)._asdict().items():
        if change != Change.NONE:
            then = ", in forward and again in backward, unless ranks share memory" if name == "before_use" else ""
            if change == Change.REDUCE_SCATTER and replicas > 1:
                then += f", then an all-reduce of the shard over {replicas} replicas"
            lines.append(f"{name.replace('_', ' ')}: {change}{then}")
    if any(has_master_weights(bucket, plan.precision) for bucket in buckets):
        lines.append(f"the update keeps {plan.precision} weights in float32 as well, {resting.state}")
    if reduce_format is not None:
        lines.append(f"gradients are summed in {reduce_format.dtype}")
    return lines


def _format_bytes(stage: StageBuckets, plan: Plan) -> str:
    total = sum(bucket.num_bytes for bucket in stage.gradient_buckets)
    sent = stage_sent_bytes(plan, stage, plan.shard_groups, is_coded=False)
    lines = [f"gradients         {format_bytes(total)} a rank"]
    if plan.reduce_group_size == 1:
        return "bytes\n" + indent([*lines, "one data rank: no gradient is sent"])
    if plan.codec != "none":
        codec_bytes = stage_sent_bytes(plan, stage, plan.shard_groups)
        network = f"{format_bytes(codec_bytes)} sent by each rank in each step, {_format_ratio(codec_bytes, sent)}"
        shared = "nothing is sent, and gradients are encoded too: training is the same as over a network"
    elif plan.sync == "local":
        network = f"{format_bytes(sent / plan.sync_interval)} sent by each rank in each step on average, "
        network += f"{format_bytes(sent)} in every {format_ordinal(plan.local_steps)}"
        shared = "nothing is sent: ranks of one host read each other's weights in place"
    else:
        times = sent / (total * (plan.reduce_group_size - 1) / plan.reduce_group_size)
        network = f"{format_bytes(sent)} sent by each rank in each step, {times:g} (N − 1) / N of the gradients"
        what = "gradients and weights" if plan.zero == 3 else "gradients"
        shared = f"nothing is sent: ranks of one host read each other's {what} in place"
    return "bytes\n" + indent([*lines, f"over a network    {network}", f"in shared memory  {shared}"])


def _format_statistics(model: nn.Module, plan: Plan) -> str:
    """What batch normalization adds to the bytes: norms that use statistics of the batch, each called once."""
    channels = [norm.num_features for _, norm in batch_norms(model) if uses_batch_stats(norm)]
    if plan.batch_norm != "sync" or not channels or plan.dp == 1:
        return ""
    sent = format_bytes(statistics_sent_bytes(channels, plan.dp))
    norms = f"{len(channels)} batch {'normalization' if len(channels) == 1 else 'normalizations'}"
    line = f"batch_norm        over a network, {sent} more for the statistics of {norms}, in forward and in backward"
    return "\n" + indent([line])


def _format_ratio(codec_bytes: float, plain_bytes: float) -> str:
    if codec_bytes <= plain_bytes:
        return f"{plain_bytes / codec_bytes:.3g} times less than without the codec"
    return f"{codec_bytes / plain_bytes:.3g} times as much as without the codec"


# ---- memory ----------------------------------------------------------------------------------------------------------


NETWORK, SHARED_MEMORY = "over a network", "in shared memory"


def rank_memory(blueprint: Blueprint) -> list[HostMemoryUse]:
    """By place: bytes of one rank, from step to step, without activations."""
    plan, uses = blueprint.plan, dict[int, list[HostMemoryUse]]()
    for group in blueprint.groups:
        size = len(group.ranks)
        ranks = HostRanks(size, plan.shard_groups, has_shared_memory=False)
        of = bytes_by_bucket(plan, group.stage, blueprint.update_spec)
        together = host_memory_use(of, zero=plan.zero, host=ranks)
        uses.setdefault(group.stage.stage, []).append(HostMemoryUse(*(each / size for each in together)))
    return [max(uses[place], key=lambda use: use.total) for place in sorted(uses)]


def _memory_of_ranks(by_place: Sequence[HostMemoryUse], size: int) -> dict[str, HostMemoryUse]:
    """What a rank on a network holds, by what is printed of it; places that hold as much are one."""
    if size == 1:
        return {"one rank": by_place[0]}
    places_of: dict[tuple[str, ...], list[int]] = {}
    for place, use in enumerate(by_place):
        places_of.setdefault(tuple(map(format_bytes, use)), []).append(place)
    where = [(each[0], f" at pp {format_ranges(each)}" if len(places_of) > 1 else "") for each in places_of.values()]
    return {f"a rank{at} on a network of {size}": by_place[place] for place, at in where}


def _format_memory(blueprints: Mapping[str, Blueprint]) -> str:
    """The memory of a plan. `blueprints`: by how its ranks reach each other."""
    plan = next(iter(blueprints.values())).plan
    size = plan.mesh.size
    uses: dict[str, HostMemoryUse] = {}
    for place, blueprint in blueprints.items():
        if place == NETWORK:
            uses |= _memory_of_ranks(rank_memory(blueprint), size)
        else:
            uses[f"a host of {size} ranks"] = blueprint.host_memory
    kinds = [kind for kind in HostMemoryUse._fields if any(getattr(use, kind) for use in uses.values())]
    rows = [(*kinds, "in all", "")]
    rows += [(*(format_bytes(getattr(u, k)) for k in kinds), format_bytes(u.total), name) for name, u in uses.items()]
    lines = table_lines(rows, ">" * (len(kinds) + 1) + "<")
    if has_unbucketed_grads(plan):
        lines.append("gradients stay where autograd puts them until the update has used them")
    if plan.codec != "none":
        lines.append("the state of the codec is not counted")
    return "memory   kept between steps, without activations\n" + indent(lines)


# ---- recompute -------------------------------------------------------------------------------------------------------


PRODUCTS = "products with weights and fused attention"


def format_recompute(model: nn.Module, plan: Plan) -> str:
    """What autograd keeps of a microbatch in each block. Raises PlanError."""
    blocks = recomputed_blocks(model, plan.recompute, map_stages(model, plan.stage_spec).chain.blocks)
    lines = [f"kept of each   {_kept(plan)}", f"computed again {_computed_again(plan)}"]
    head = f"recompute   {plan.recompute}: {len(blocks)} blocks, {blocks[0]} to {blocks[-1].rpartition('.')[2]}"
    return f"{head}\n{indent(lines)}"


def _kept(plan: Plan) -> str:
    if plan.recompute == "full":
        shares = plan.tp > 1 and not plan.sequence_parallel
        return f"1/{plan.tp} of its inputs: each tensor rank has a part" if shares else "its inputs"
    sums = ["sums over tensor ranks"] if plan.tp > 1 else []
    sums += ["what attention has exchanged"] if plan.cp > 1 else []
    return ", ".join(["its inputs", f"results of {PRODUCTS}", *sums])


def _computed_again(plan: Plan) -> str:
    if plan.recompute == "full":
        sent = plan.tp > 1 or plan.cp > 1
        return "everything else, in backward; what it sends is sent again" if sent else "everything else, in backward"
    gathered = plan.tp > 1 and plan.sequence_parallel
    return "everything else, in backward" + ("; tokens are gathered again" if gathered else "")
