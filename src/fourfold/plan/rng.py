"""RNG: the state that torch's generators have on each rank, at the start of a run and after a resume.

data index   a rank's index on dp: ranks with the same data index hold tokens of the same samples
stage        a rank's index on pp: stages have other layers, which must not drop alike
random place the two of them; ranks that differ on cp or tp alone are at the same one
Law: ranks at the same random place have the same state, whatever the mesh; other places have other states.
      A model on several stages draws from these states only outside of its forward: `microbatch_seed`, `segment_seed`.
"""

import hashlib

from fourfold.plan.checkpoint_manifest import Manifest, Place, RngState, place_of
from fourfold.words.mesh import Mesh

# Distant primes, so that seeds differ between data indices, between stages, and between nearby steps.
_INDEX_STRIDE, _STAGE_STRIDE, _STEP_STRIDE = 1_000_003, 998_244_353, 7_919


def random_place(mesh: Mesh, rank: int) -> Place:
    """The place whose random numbers a rank draws."""
    return place_of(mesh, rank, "pp", "dp")


def generator_seed(seed: int, dp_index: int, *, stage: int = 0, step: int = 0) -> int:
    """The seed of the generators at a random place, for a run that starts after `step` steps."""
    return (seed + _INDEX_STRIDE * dp_index + _STAGE_STRIDE * stage + _STEP_STRIDE * step) % 2**64


def microbatch_seed(seed: int, dp_index: int, step: int, microbatch: int) -> int:
    """The seed of what a model draws for a microbatch if it has several stages: the same on all of them."""
    return _hashed(seed, dp_index, step, microbatch)


def segment_seed(microbatch: int, segment: int) -> int:
    """The seed of one segment of the model's forward, from that of the microbatch."""
    return _hashed(microbatch, segment)


def _hashed(*numbers: int) -> int:
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def rng_state_to_restore(manifest: Manifest, mesh: Mesh, rank: int) -> RngState | None:
    """The saved state that this rank of `mesh` restores; None if it must seed its generators instead.

    States are restored only if dp and pp still have the same size: else a place stands for other samples or layers.
    """
    saved = manifest.mesh
    if (saved.dp, saved.pp) != (mesh.dp, mesh.pp):
        return None
    states = {state.place: state for state in manifest.random}
    return states[random_place(mesh, rank)]
