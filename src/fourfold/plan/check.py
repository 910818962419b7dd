"""Check: whether the fields of a plan go together, and whether the plan fits a number of ranks.

Each field alone is checked when the plan is made (`plan/plan_fields.py`). What depends on the model is checked in
`step/model_checks.py`.

Law: no silent fallback. What a plan asks for happens, or is refused, with all problems at once.
"""

from fourfold.plan.codec import CODECS
from fourfold.plan.plan import Plan, candidate_meshes
from fourfold.words.errors import Problem


def combination_problems(plan: Plan, *, clip: float | None = None) -> list[Problem]:
    """Every combination of fields that cannot be carried out, with any model and on any ranks."""
    return update_problems(plan, clip) + sync_problems(plan) + precision_problems(plan) + codec_problems(plan)


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
        attempt = 'unused = "refuse", or update = "in_forward"'
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
            plan.sp > 1,
            f"sp = {plan.sp}",
            "ranks with whole samples: ranks of one sequence need each other in every step",
            'sp = 1, or sync = "step"',
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
            'unused = "refuse", or sync = "step"',
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
        need = "finite gradients: a codec would keep an overflow in its residual for ever"
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
        problems.append(Problem(f'{codec} with unused = "allow"', need, 'unused = "refuse", or codec = "bf16"'))
    return problems


def layerwise_problems(plan: Plan, optimizer_name: str) -> list[Problem]:
    """What a layer-wise optimizer (LARS, LAMB) cannot do: its update needs the norms of whole parameters."""
    if plan.update != "in_backward" or plan.zero == 0 or plan.reduce_group_size == 1:
        return []
    got = f'update = "in_backward" with {optimizer_name} at zero = {plan.zero}'
    need = "the norms of whole parameters, which are split among ranks, before a bucket is updated"
    return [Problem(got, need, 'update = "in_forward", or zero = 0')]


def model_loss_problems(plan: Plan) -> list[Problem]:
    """Why the model's own loss cannot be trained: with sp > 1 a rank has only some tokens of a sample."""
    if plan.sp == 1:
        return []
    got = f"sp = {plan.sp} and loss = None: the model's own loss"
    need = "a loss of each token and its target: a causal model shifts labels inside, past the rank's last token"
    attempt = "loss(outputs, targets) with targets that the data has shifted, or sp = 1"
    return [Problem(got, need, attempt)]


def size_problems(plan: Plan, num_ranks: int) -> list[Problem]:
    """The mesh must have as many places as there are ranks."""
    mesh = plan.mesh
    if mesh.size == num_ranks:
        return []
    got = f"pp × dp × sp × tp = {mesh.pp} × {mesh.dp} × {mesh.sp} × {mesh.tp} = {mesh.size}"
    # Suggest a mesh with the same sp if there is one, else data ranks alone.
    candidates = [each for each in candidate_meshes(num_ranks) if each.sp == mesh.sp] or candidate_meshes(num_ranks)[:1]
    axes = f"dp = {candidates[0].dp}" + (f", sp = {candidates[0].sp}" if mesh.sp > 1 else "")
    return [Problem(got, f"the number of ranks, {num_ranks}", f"{axes}, or -n {mesh.size}")]
