"""The law of the mesh on processes: all meshes of so many ranks in one world, one after the other.

    python -m tests.spawned_law [--ranks 8] [--gpus]

--gpus   over NCCL, on the GPUs of this machine; ranks share them where there are more ranks

Prints a line for each mesh and model; ends with status 1 unless every deviation is within the tolerance.
Law: a mesh that deviates, fails or hangs does not keep the meshes behind it from being tried.
"""

import argparse
import sys
import time
from pathlib import Path

import torch

from fourfold.testing.oracle import TOLERANCE
from fourfold.testing.process_world import CaseFailed, SpawnedWorld
from tests.mesh_law import DIVISORS, MODELS, NUM_RANKS, meshes, variant

MESH_LIMIT_SECONDS = 60.0
WORLD_LIMIT_SECONDS = 300.0


def main() -> int:
    """Train on every mesh; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, choices=DIVISORS, default=NUM_RANKS)
    parser.add_argument("--gpus", action="store_true")
    options = parser.parse_args()
    num_gpus = torch.cuda.device_count() if options.gpus else 0
    if options.gpus and not num_gpus:
        parser.error("--gpus: PyTorch sees no GPU here")
    world = SpawnedWorld(options.ranks, root=Path(__file__).resolve().parents[1], num_gpus=num_gpus)
    tried = [(model, mesh) for model in MODELS for mesh in meshes(options.ranks)]
    began, num_failed = time.monotonic(), 0
    print(f"{'model':<6}{'pp dp cp tp':<13}{'variant':<58}{'deviation':>10}{'seconds':>9}")
    try:
        for model, mesh in tried:
            left = began + WORLD_LIMIT_SECONDS - time.monotonic()
            if left <= 0:
                print(f"need all meshes within {WORLD_LIMIT_SECONDS:.0f} s")
                return 1
            num_failed += not _holds(world, mesh, model, min(left, MESH_LIMIT_SECONDS))
    finally:
        world.kill()
    print(f"{len(tried) - num_failed} of {len(tried)} train as one device, in {time.monotonic() - began:.0f} s")
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
