"""Describe recompute: the blocks that backward computes again, and what is kept of each.

Law: the blocks are those of a step (`step/recompute.py`), and a model without blocks is refused as a step refuses it.
"""

from torch import nn

from fourfold.analysis.describe_programs import indent
from fourfold.plan.plan import Plan
from fourfold.plan.tensor_residual import WHOLE
from fourfold.step.pipeline.chain import map_stages
from fourfold.step.recompute import recomputed_blocks

PRODUCTS = "products with weights and fused attention"


def format_recompute(model: nn.Module, plan: Plan) -> str:
    """What autograd keeps of a microbatch in each block. Raises PlanError."""
    blocks = recomputed_blocks(model, plan.recompute, map_stages(model, plan.stage_spec).chain.blocks)
    lines = [f"kept of each   {_kept(plan)}", f"computed again {_computed_again(plan)}"]
    head = f"recompute   {plan.recompute}: {len(blocks)} blocks, {blocks[0]} to {blocks[-1].rpartition('.')[2]}"
    return f"{head}\n{indent(lines)}"


def _kept(plan: Plan) -> str:
    if plan.recompute == "full":
        shares = plan.tp > 1 and plan.residual == WHOLE
        return f"1/{plan.tp} of its inputs: each tensor rank has a part" if shares else "its inputs"
    sums = ["sums over tensor ranks"] if plan.tp > 1 else []
    sums += ["what attention has exchanged"] if plan.sp > 1 else []
    return ", ".join(["its inputs", f"results of {PRODUCTS}", *sums])


def _computed_again(plan: Plan) -> str:
    if plan.recompute == "full":
        sent = plan.tp > 1 or plan.sp > 1
        return "everything else, in backward; what it sends is sent again" if sent else "everything else, in backward"
    gathered = plan.tp > 1 and plan.residual != WHOLE
    return "everything else, in backward" + ("; tokens are gathered again" if gathered else "")
