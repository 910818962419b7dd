"""Several data groups in one world: each trains as if it were alone, with memory and process groups of its own."""

import dataclasses

import pytest
import torch

from fourfold.testing import threads
from fourfold.words.mesh import Mesh
from tests.cases import Case, build_step, train_step

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASES = {
    "whole": Case(clip=0.5),
    "one copy": Case(zero=1, clip=0.5, model="tied"),
    "split": Case(zero=3, microbatches=2, update="in_forward"),
    "in backward": Case(zero=2, update="in_backward", bucket_bytes=2000),
}
# The mesh, the number of hosts, on how many of them each group is, and what joins its ranks.
PLACES = [
    (Mesh(dp=2, tp=2), 1, 1, "shared memory"),
    (Mesh(pp=2, dp=2), 1, 1, "shared memory"),
    (Mesh(pp=2, dp=2), 2, 1, "shared memory"),
    (Mesh(dp=2, tp=2), 2, 2, "gloo"),
]


def of_group(case, number):
    """The case with other batches for each group."""
    return dataclasses.replace(case, batch_sizes=((12, 9, 13), (7, 10, 8))[number])


@pytest.mark.covering
@pytest.mark.parametrize(("mesh", "hosts", "hosts_of_group", "transport"), PLACES)
@pytest.mark.parametrize("kind", CASES)
def test_two_data_groups_in_one_world_train_as_two_worlds_would(kind, mesh, hosts, hosts_of_group, transport):
    groups = mesh.groups("dp", "cp")

    def train(case, comm):
        step = build_step(case, 2, comm)
        assert step.transport_name.startswith(transport)
        trained = train_step(case, step)
        return trained.losses, trained.weights

    def in_one_world(comm):
        number = next(number for number, ranks in enumerate(groups) if comm.rank in ranks)
        return train(of_group(CASES[kind], number), comm.on_mesh(mesh).along("dp", "cp"))

    together = threads.run(4, in_one_world, hosts=hosts)
    for number, ranks in enumerate(groups):
        case = of_group(CASES[kind], number)
        alone = threads.run(2, lambda comm, case=case: train(case, comm), hosts=hosts_of_group)
        for rank, (losses, weights) in zip(ranks, alone, strict=True):
            assert together[rank][0] == losses
            assert together[rank][1].keys() == weights.keys()
            assert all(torch.equal(together[rank][1][name], weight) for name, weight in weights.items())
