"""The law of the mesh on processes: all twenty meshes of eight ranks in one world, one after the other.

    python -m tests.spawned_law

Prints a line for each mesh and model; ends with status 1 unless every deviation is within the tolerance.
Law: a mesh that deviates, fails or hangs does not keep the meshes behind it from being tried.
"""

import sys
import time
from pathlib import Path

from fourfold.testing.oracle import TOLERANCE
from fourfold.testing.process_world import CaseFailed, SpawnedWorld
from tests.mesh_law import MESHES, MODELS, NUM_RANKS, variant

MESH_LIMIT_SECONDS = 60.0
WORLD_LIMIT_SECONDS = 300.0


def main() -> int:
    """Train on every mesh; the exit status."""
    world = SpawnedWorld(NUM_RANKS, root=Path(__file__).resolve().parents[1])
    began, num_failed = time.monotonic(), 0
    print(f"{'model':<6}{'pp dp sp tp':<13}{'variant':<58}{'deviation':>10}{'seconds':>9}")
    try:
        for model in MODELS:
            for mesh in MESHES:
                left = began + WORLD_LIMIT_SECONDS - time.monotonic()
                if left <= 0:
                    print(f"need all meshes within {WORLD_LIMIT_SECONDS:.0f} s")
                    return 1
                num_failed += not _holds(world, mesh, model, min(left, MESH_LIMIT_SECONDS))
    finally:
        world.kill()
    count = len(MESHES) * len(MODELS)
    print(f"{count - num_failed} of {count} train as one device, in {time.monotonic() - began:.0f} s")
    return int(num_failed > 0)


def _holds(world: SpawnedWorld, mesh: tuple[int, int, int, int], model: str, limit_seconds: float) -> bool:
    """Whether all ranks train as one device on a mesh; prints its line."""
    began, failure = time.monotonic(), ""
    try:
        found = world.run("tests.mesh_law:deviation", mesh=mesh, model=model, time_limit_seconds=limit_seconds)
        result, holds = f"{max(found):.1e}", max(found) <= TOLERANCE
    except CaseFailed as error:
        failure, result, holds = str(error), "failed", False
    places = "  ".join(map(str, mesh))
    seconds = time.monotonic() - began
    print(f"{model:<6}{places:<13}{variant(mesh, model)!s:<58}{result:>10}{seconds:>9.1f}", flush=True)
    if failure:
        print(failure, flush=True)
    return holds


if __name__ == "__main__":
    sys.exit(main())
