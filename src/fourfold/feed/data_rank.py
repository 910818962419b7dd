"""Data rank: which part of every batch this rank reads.

Law: ranks that differ on other axes than dp read the same samples.
"""

from fourfold.comm import init
from fourfold.plan.plan import Plan
from fourfold.words.errors import DataError, Problem


def dp_size_and_index(plan: Plan | None, *, where: str) -> tuple[int, int]:
    """The size of the data axis and this rank's index on it. Raises DataError for a plan of another number of ranks."""
    world = init.world()
    if plan is None:
        return world.size, world.rank
    if plan.mesh.size != world.size:
        got = f"a plan of {plan.mesh.size} ranks in a world of {world.size}"
        attempt = "the plan that the model is trained with, or no plan: then all ranks are data ranks"
        raise DataError(Problem(got, "one for each rank", attempt), where=where)
    return plan.dp, plan.mesh.coordinates(world.rank)["dp"]
