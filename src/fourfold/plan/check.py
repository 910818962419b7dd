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
from fourfold.plan.codec import CODECS
from fourfold.plan.model_traits import TRAIT_FIELDS, ModelTraits, trait_problems
from fourfold.plan.param_spec import ParamSpec, UpdateSpec
from fourfold.plan.plan import Plan, candidate_meshes
from fourfold.plan.topology import Topology, group_hosts, num_host_shards
from fourfold.words.error_notes import format_names
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
    problems = []
    if plan.update == "in_backward" and clip is not None:
        got = f'update = "in_backward" with clip = {clip:g}'
        need = "the norm of all gradients before the first bucket is updated"
        problems.append(Problem(got, need, 'clip = none, or update = "in_forward"'))
    problems += _rule_problems(plan) + sequence_parallel_problems(plan)
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


class Rule(NamedTuple):
    """Why a field must have another value than it has, where a plan has some setting.

    need         what another value would need
    alternative  what else there is to try; "": the default of the setting
    allowed      the values that go with the setting; (): the field's default
    """

    need: str
    alternative: str = ""
    allowed: tuple[object, ...] = ()


RULES: dict[tuple[str, object], dict[str, Rule]] = {
    # Before a bucket is updated in backward, everything that its update depends on must be known.
    ("update", "in_backward"): {
        "unused": Rule(
            "to know, before a bucket is updated, which parameters have no gradient on any rank",
            'update = "in_forward"',
        )
    },
    # With local steps, each rank has whole weights, optimizer states and gradients of its own.
    ("sync", "local"): {
        "offload": Rule("weights that are averaged on the device where they are updated"),
        "precision": Rule("an average of the weights that the update keeps, not of their rounded copies"),
        "cp": Rule("ranks with whole samples: ranks of one sequence need each other in every step"),
        "zero": Rule("whole weights and optimizer states on each rank: its own differ from the others'"),
        "codec": Rule("gradients that are sent between ranks: with local steps they stay on their rank"),
        "unused": Rule("optimizer states for the same parameters on every rank: ranks may use different parameters"),
        "update": Rule(
            "updated weights at the end of the step, when ranks average them", '"after"', ("in_backward", "after")
        ),
    },
    # With fp16 any scaled gradient may overflow: all must be known before the first weight changes.
    ("precision", "fp16"): {
        "update": Rule(
            "to know that no gradient has overflowed before the first bucket is updated",
            'precision = "bf16"',
            ("after", "in_forward"),
        ),
        "codec": Rule("finite gradients: a codec would keep an overflow in its residual forever", 'precision = "bf16"'),
    },
    # A codec compresses gradients only, and what it has not sent yet it adds to later gradients.
    **{
        ("codec", kind): {
            "zero": Rule(
                "gradients to be most of the traffic: at zero 3 two thirds are weights, which codecs do not compress",
                allowed=(2, 1, 0),
            ),
            "unused": Rule(
                "a gradient for every parameter: the residual of a parameter that no rank uses would not be applied",
                'codec = "bf16"',
                ("error",) if row.remembers else ("error", "allow"),
            ),
        }
        for kind, row in CODECS.items()
    },
    # Statistics over ranks need all activations of a global batch at once.
    ("batch_norm", "sync"): {
        "microbatches": Rule(
            "the whole batch in one forward: statistics over microbatches would need a second forward of each",
            "GroupNorm",
        ),
        "cp": Rule(
            "ranks with whole samples: ranks of one sequence have different numbers of its tokens, padding among them",
            "LayerNorm",
        ),
        "sync": Rule(
            "ranks that run each forward together: with local steps every rank trains on its own",
            'batch_norm = "local"',
        ),
    },
}
"""By a setting of a plan: the fields that must go with it."""


def _setting(field: str, value: object) -> str:
    return f"{field} = {json.dumps(value)}"  # as TOML has it


def _rule_problems(plan: Plan) -> list[Problem]:
    problems, defaults = [], vars(Plan())
    for (setting, value), rules in RULES.items():
        if getattr(plan, setting) != value:
            continue
        for field, rule in rules.items():
            allowed = rule.allowed or (defaults[field],)
            if getattr(plan, field) not in allowed:
                got = f"{_setting(setting, value)} with {_setting(field, getattr(plan, field))}"
                alternative = rule.alternative or _setting(setting, defaults[setting])
                problems.append(Problem(got, rule.need, f"{_setting(field, allowed[0])}, or {alternative}"))
    return problems


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
        got = f"{codec}, where several ranks hold the same part of {format_names(names)}"
        need = "the same gradient on all of them: what this codec sends of it depends on what else a rank holds"
        attempt = 'codec = "bf16", or at most as many tensor ranks as heads of keys and values'
        problems.append(Problem(got, need, attempt))
    if names := [spec.name for spec in specs if not all(shard.num_elements for shard in spec.shards)]:
        got = f"{codec}, where some rank holds nothing of {format_names(names)}"
        problems.append(Problem(got, "a part of each weight on each rank", 'codec = "bf16", or a smaller tp'))
    return problems


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
    default = Plan()
    names = ["zero"] if plan.zero > 0 and plan.num_shards > 1 else []
    fields = ("tp", "pp", "update", "sync", "precision", "offload")
    names += [name for name in fields if getattr(plan, name) != getattr(default, name)]
    return {_setting(name, getattr(plan, name)): _setting(name, getattr(default, name)) for name in names}


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
            return ReadOnlyReason(_setting(field, value), reason, _setting(field, default))
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
