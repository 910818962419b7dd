"""Check: whether the fields of a plan go together, and whether the plan fits a number of ranks.

Each field alone, and what must divide what, is checked when the plan is made (`plan/plan_fields.py`); what depends on
the model, in `step/model_checks.py`.

Law: no silent fallback. What a plan asks for happens, or is refused, with all problems at once.
"""

import json
from collections.abc import Sequence
from typing import NamedTuple

from fourfold.axes.pipeline.rules import conflicts
from fourfold.axes.pipeline.rules.division import stage_count_problems
from fourfold.axes.pipeline.rules.edges import edge_problems
from fourfold.axes.pipeline.rules.schedules import schedule_problems
from fourfold.plan.batch_norm import SYNC
from fourfold.plan.codec import CODECS
from fourfold.plan.model_traits import TRAIT_FIELDS, ModelTraits, trait_problems
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan, candidate_meshes
from fourfold.plan.topology import Topology, group_hosts, num_host_shards
from fourfold.words.errors import Problem


class ReadOnlyReason(NamedTuple):
    """Why forward may not write weights: the plan's setting, what happens to a write, and a setting to try."""

    setting: str
    reason: str
    attempt: str


def legality_problems(
    plan: Plan, specs: Sequence[ParamSpec], topology: Topology, update_spec: UpdateSpec
) -> list[Problem]:
    """Every reason why a plan cannot be carried out with these parameters and this optimizer on these machines."""
    problems = size_problems(plan, topology.size) + param_problems(plan, specs)
    problems += combination_problems(plan, clip=update_spec.clip)
    if update_spec.is_layerwise:
        problems += layerwise_problems(plan, update_spec.optimizer)
    problems += transport_device_problems(plan.transport, topology.device)
    # Neither question has an answer while the others are open.
    return problems or shared_memory_problems(plan, topology)


def combination_problems(plan: Plan, *, clip: float | None = None) -> list[Problem]:
    """Every combination of fields that cannot be carried out, with any model and on any ranks."""
    problems = update_problems(plan, clip) + sync_problems(plan) + precision_problems(plan)
    problems += codec_problems(plan) + batch_norm_problems(plan) + sequence_parallel_problems(plan)
    return problems + pipeline_problems(plan, clip)


def pipeline_problems(plan: Plan, clip: float | None) -> list[Problem]:
    """What a schedule cannot be made for, what does not go with it, and edges without stages."""
    problems = edge_problems(plan.edge, plan.edge_density, plan.pp)
    if plan.pp == 1:
        return problems
    problems += stage_count_problems(plan.stages, plan.num_stages)
    problems += schedule_problems(plan.schedule, **plan.schedule_sizes)
    halves = not problems and plan.divides_backward
    problems += conflicts.recompute_problems(plan.recompute, plan.schedule, divides_backward=halves)
    if plan.is_asynchronous:
        problems += conflicts.asynchronous_problems(
            plan.schedule, {f: getattr(plan, f) for f in conflicts.SYNCHRONOUS_ONLY}, clip
        )
    return problems


def update_problems(plan: Plan, clip: float | None) -> list[Problem]:
    """Before a bucket is updated in backward, everything that its update depends on must be known."""
    if plan.update != "in_backward":
        return []
    problems = []
    if clip is not None:
        need = "the norm of all gradients before the first bucket is updated"
        problems.append(
            Problem(f'update = "in_backward" with clip = {clip:g}', need, 'clip = none, or update = "in_forward"')
        )
    if plan.unused == "allow":
        need = "to know, before a bucket is updated, which parameters have no gradient on any rank"
        attempt = 'unused = "error", or update = "in_forward"'
        problems.append(Problem('update = "in_backward" with unused = "allow"', need, attempt))
    return problems


def sync_problems(plan: Plan) -> list[Problem]:
    """With local steps, each rank has whole weights, optimizer states and gradients of its own."""
    if plan.sync != "local":
        return []
    local = 'sync = "local"'
    rules = [
        (
            plan.offload != "none",
            f'offload = "{plan.offload}"',
            "weights that are averaged on the device where they are updated",
            'offload = "none", or sync = "step"',
        ),
        (
            plan.precision != "keep",
            f'precision = "{plan.precision}"',
            "an average of the weights that the update keeps, not of their rounded copies",
            'precision = "keep", or sync = "step"',
        ),
        (
            plan.cp > 1,
            f"cp = {plan.cp}",
            "ranks with whole samples: ranks of one sequence need each other in every step",
            'cp = 1, or sync = "step"',
        ),
        (
            plan.zero > 0,
            f"zero = {plan.zero}",
            "whole weights and optimizer states on each rank: its own differ from the others'",
            'zero = 0, or sync = "step"',
        ),
        (
            plan.codec != "none",
            f'codec = "{plan.codec}"',
            "gradients that are sent between ranks: with local steps they stay on their rank",
            'codec = "none", or sync = "step"',
        ),
        (
            plan.unused == "allow",
            'unused = "allow"',
            "optimizer states for the same parameters on every rank: ranks may use different parameters",
            'unused = "error", or sync = "step"',
        ),
        (
            plan.update == "in_forward",
            'update = "in_forward"',
            "updated weights at the end of the step, when ranks average them",
            'update = "in_backward", or "after"',
        ),
    ]
    return [Problem(f"{local} with {got}", need, attempt) for is_set, got, need, attempt in rules if is_set]


def precision_problems(plan: Plan) -> list[Problem]:
    """With fp16 any scaled gradient may overflow: all must be known before the first weight changes."""
    if plan.precision != "fp16":
        return []
    problems, fp16 = [], 'precision = "fp16"'
    if plan.update == "in_backward":
        need = "to know that no gradient has overflowed before the first bucket is updated"
        got = f'{fp16} with update = "{plan.update}"'
        problems.append(Problem(got, need, 'precision = "bf16", or update = "after"'))
    if plan.codec != "none":
        need = "finite gradients: a codec would keep an overflow in its residual forever"
        problems.append(Problem(f'{fp16} with codec = "{plan.codec}"', need, 'precision = "bf16", or codec = "none"'))
    return problems


def codec_problems(plan: Plan) -> list[Problem]:
    """A codec compresses gradients only, and what it has not sent yet it adds to later gradients."""
    if plan.codec == "none":
        return []
    problems, codec = [], f'codec = "{plan.codec}"'
    if plan.zero == 3:
        need = "gradients to be most of the traffic: at zero 3 two thirds are weights, which codecs do not compress"
        problems.append(Problem(f"{codec} with zero = 3", need, 'zero = 2, or codec = "none"'))
    if CODECS[plan.codec].remembers and plan.unused == "allow":
        need = "a gradient for every parameter: the residual of a parameter that no rank uses would not be applied"
        problems.append(Problem(f'{codec} with unused = "allow"', need, 'unused = "error", or codec = "bf16"'))
    return problems


def batch_norm_problems(plan: Plan) -> list[Problem]:
    """Statistics over ranks need all activations of a global batch at once."""
    if plan.batch_norm != "sync":
        return []
    rules = [
        (
            plan.microbatches > 1,
            f"microbatches = {plan.microbatches}",
            "the whole batch in one forward: statistics over microbatches would need a second forward of each",
            "microbatches = 1, or GroupNorm",
        ),
        (
            plan.cp > 1,
            f"cp = {plan.cp}",
            "ranks with whole samples: ranks of one sequence have different numbers of its tokens, padding among them",
            "cp = 1, or LayerNorm",
        ),
        (
            plan.sync == "local",
            'sync = "local"',
            "ranks that run each forward together: with local steps every rank trains on its own",
            'sync = "step", or batch_norm = "local"',
        ),
    ]
    return [Problem(f"{SYNC} with {got}", need, attempt) for is_set, got, need, attempt in rules if is_set]


def sequence_parallel_problems(plan: Plan) -> list[Problem]:
    """Sequence parallelism splits tokens over tensor ranks."""
    if not plan.sequence_parallel or plan.tp > 1:
        return []
    got = "sequence_parallel = true with tp = 1"
    return [Problem(got, "tensor ranks to split the tokens over", "tp = 2, or sequence_parallel = false")]


def layerwise_problems(plan: Plan, optimizer_name: str) -> list[Problem]:
    """What a layer-wise optimizer (LARS, LAMB) cannot do: its update needs the norms of whole parameters."""
    is_sharded = plan.zero > 0 and plan.reduce_group_size > 1
    if plan.update != "in_backward" or not (is_sharded or plan.tp > 1):
        return []
    split_by = ([f"zero = {plan.zero}"] if is_sharded else []) + ([f"tp = {plan.tp}"] if plan.tp > 1 else [])
    got = f'update = "in_backward" with {optimizer_name} at {", ".join(split_by)}'
    need = "the norms of whole parameters, which are split among ranks, before a bucket is updated"
    return [Problem(got, need, 'update = "in_forward"' + (', or "after"' if plan.tp > 1 else ", or zero = 0"))]


def param_problems(plan: Plan, specs: Sequence[ParamSpec]) -> list[Problem]:
    """Problems of the trainable parameters: there must be some, and a codec must suit them."""
    problems = []
    if not specs:
        problems.append(Problem("a model without trainable parameters", "at least one with requires_grad"))
    complex_names = [f"{spec.name} (torch.{spec.dtype})" for spec in specs if spec.dtype.startswith("complex")]
    if plan.codec != "none" and complex_names:
        got = f'codec = "{plan.codec}" and {", ".join(complex_names[:3])}'
        problems.append(Problem(got, "gradients of real floating-point numbers", 'codec = "none"'))
    ties = [spec.name for spec in specs if spec.is_tied]
    return (
        problems
        + replica_problems(plan, specs)
        + conflicts.tie_problems(ties, plan.update, is_asynchronous=plan.is_asynchronous)
    )


def replica_problems(plan: Plan, specs: Sequence[ParamSpec]) -> list[Problem]:
    """Tensor ranks that hold the same part of a weight must send the same of it, whatever else they hold."""
    if plan.codec == "none" or CODECS[plan.codec].is_elementwise:
        return []
    problems, codec = [], f'codec = "{plan.codec}" and tp = {plan.tp}'
    if names := [spec.name for spec in specs if spec.num_replicas is None]:
        got = f"{codec}, where several ranks hold the same part of {_listed(names)}"
        need = "the same gradient on all of them: what this codec sends of it depends on what else a rank holds"
        attempt = 'codec = "bf16", or at most as many tensor ranks as heads of keys and values'
        problems.append(Problem(got, need, attempt))
    if names := [spec.name for spec in specs if not all(shard.num_elements for shard in spec.shards)]:
        got = f"{codec}, where some rank holds nothing of {_listed(names)}"
        problems.append(Problem(got, "a part of each weight on each rank", 'codec = "bf16", or a smaller tp'))
    return problems


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' …' if names[3:] else ''}"


def transport_device_problems(transport: str, device: str) -> list[Problem]:
    """The transports that a kind of device cannot have."""
    unsupported = {"nccl": "cpu", "shared": "cuda", "gloo": "cuda"}.get(transport)
    if unsupported != device:
        return []
    need = "GPUs" if device == "cpu" else "CPU ranks"
    return [Problem(f'transport = "{transport}" on {device}', need, 'transport = "auto"')]


def shared_memory_problems(plan: Plan, topology: Topology) -> list[Problem]:
    """Where hosts must share memory or do, whether their ranks can, and whether shards are made of whole hosts."""
    problems: list[Problem] = []
    for ranks in plan.mesh.groups("dp", "cp"):
        hosts = group_hosts(topology, ranks, transport=plan.transport)
        if hosts.shares_memory:
            if plan.num_shards > 1 and num_host_shards(plan.num_shards, hosts.ranks_per_host) is None:
                problems.append(host_shard_problem(plan.num_shards, hosts.num_hosts, hosts.ranks_per_host))
        elif plan.transport == "shared" and len(ranks) > 1:
            problems.append(no_shared_memory_problem(hosts.unshared_cause))
    if plan.transport == "shared":
        # Keys and values travel in shared memory too.
        apart = [ranks for ranks in plan.mesh.groups("cp") if len(topology.hosts_of(ranks)) > 1]
        problems += [no_shared_memory_problem(f"ranks {list(ranks)} are on several hosts") for ranks in apart[:1]]
    return list(dict.fromkeys(problems))


def no_shared_memory_problem(cause: str) -> Problem:
    """The plan asks for shared memory that the ranks cannot have."""
    return Problem(f'transport = "shared", but {cause}', "ranks that share memory", 'transport = "auto"')


def host_shard_problem(num_shards: int, num_hosts: int, ranks_per_host: int) -> Problem:
    """With shared memory, what rests split is split among whole hosts, or within each."""
    sizes = [size * ranks_per_host for size in range(1, num_hosts + 1) if num_hosts % size == 0]
    need = "whole hosts, or a part of one: a host's ranks share its memory"
    attempt = f'shard = {", ".join(map(str, sizes))}, or transport = "gloo"'
    return Problem(f"shard = {num_shards} on {num_hosts} hosts of {ranks_per_host} ranks", need, attempt)


def model_trait_problems(plan: Plan, traits: ModelTraits) -> list[Problem]:
    """Why the plan cannot be carried out with a model of these traits."""
    return trait_problems({name: getattr(plan, name) for name in TRAIT_FIELDS}, plan.batch_split, traits)


def step_hook_conflicts(plan: Plan) -> dict[str, str]:
    """The settings of the plan with which an optimizer's step hooks cannot be called, and settings with which they can.

    They can be called where every rank has all gradients and weights.
    """
    rules = [
        (plan.zero > 0 and plan.num_shards > 1, f"zero = {plan.zero}", "zero = 0"),
        (plan.tp > 1, f"tp = {plan.tp}", "tp = 1"),
        (plan.pp > 1, f"pp = {plan.pp}", "pp = 1"),
        (plan.update != "after", f'update = "{plan.update}"', 'update = "after"'),
        (plan.sync != "step", f'sync = "{plan.sync}"', 'sync = "step"'),
        (plan.precision != "keep", f'precision = "{plan.precision}"', 'precision = "keep"'),
        (plan.offload != "none", f'offload = "{plan.offload}"', 'offload = "none"'),
    ]
    return {got: attempt for is_set, got, attempt in rules if is_set}


def read_only_reason(plan: Plan, *, storage: str, master_weights: str) -> ReadOnlyReason | None:
    """The first of the plan's settings, other than by default, that has a reason against writes in forward.

    storage         why a write into the weights would be lost where they rest; empty if it would not
    master_weights  why the update would ignore it; empty if it would not
    """
    differs = plan.batch_split.has_local_batch_norm and plan.batch_split.num_parts > 1
    reasons = {
        "zero": storage,
        "precision": master_weights,
        "offload": master_weights,
        "batch_norm": "buffers may then differ between ranks, but trained weights may not" if differs else "",
    }
    for field, reason in reasons.items():
        value, default = getattr(plan, field), getattr(Plan(), field)
        if reason and value != default:
            return ReadOnlyReason(f"{field} = {json.dumps(value)}", reason, f"{field} = {json.dumps(default)}")
    return None


def size_problems(plan: Plan, num_ranks: int, *, start: str = "or start {size} ranks") -> list[Problem]:
    """The mesh must have as many places as there are ranks. `start`: how to start as many as the plan needs."""
    mesh = plan.mesh
    if mesh.size == num_ranks:
        return []
    got = f"pp × dp × cp × tp = {mesh.pp} × {mesh.dp} × {mesh.cp} × {mesh.tp} = {mesh.size}"
    fitting = candidate_meshes(num_ranks, mesh)[0]
    axes = (f"pp = {fitting.pp}, " if mesh.pp > 1 else "") + f"dp = {fitting.dp}"
    axes += f", cp = {fitting.cp}" if mesh.cp > 1 else ""
    axes += f", ulysses = {fitting.cp}" if fitting.cp < plan.ulysses else ""
    axes += f", tp = {fitting.tp}" if mesh.tp > 1 else ""
    return [Problem(got, f"the number of ranks, {num_ranks}", f"{axes}, {start.format(size=mesh.size)}")]
