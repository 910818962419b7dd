"""RNG: the state that torch's generators have on each rank, at the start of a run and after a resume.

data index  a rank's index on dp: ranks with the same data index hold tokens of the same samples
Law: ranks with the same data index have the same state, whatever the mesh; other data indices have other states.
"""

from collections.abc import Sequence

from fourfold.plan.checkpoint_manifest import Manifest, RngState
from fourfold.words.mesh import Mesh

# Two distant primes, so that seeds differ between data indices and between nearby steps.
_INDEX_STRIDE, _STEP_STRIDE = 1_000_003, 7_919


def generator_seed(seed: int, dp_index: int, *, step: int = 0) -> int:
    """The seed of the generators at a data index, for a run that starts after `step` steps."""
    return (seed + _INDEX_STRIDE * dp_index + _STEP_STRIDE * step) % 2**64


def rng_state_to_restore(manifest: Manifest, mesh: Mesh, rank: int) -> RngState | None:
    """The saved state that this rank of `mesh` restores; None if it must seed its generators instead.

    States are restored only if the data axis still has the same size: else a data index stands for other samples.
    """
    saved = manifest.mesh
    if saved is None:
        return manifest.random[rank] if _is_by_dp_index(manifest.random, mesh) else None
    if saved.dp != mesh.dp:
        return None
    return manifest.random[saved.rank_at({"dp": mesh.coordinates(rank)["dp"]})]


def _is_by_dp_index(states: Sequence[RngState], mesh: Mesh) -> bool:
    """Whether states saved without their mesh satisfy the law on this mesh."""
    if len(states) != mesh.size:
        return False
    by_index = {(mesh.coordinates(rank)["dp"], state.cpu) for rank, state in enumerate(states)}
    return len(by_index) == len({state.cpu for state in states}) == mesh.dp
