"""Laws of the wrapped optimizer: uneven data, and state that only one rank has. Ranks are threads."""

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.comm.broadcast_tree import broadcast_tree
from fourfold.step.distributed_optimizer import DistributedOptimizer
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import PlanError, TrainingError

pytestmark = pytest.mark.usefixtures("without_dry_run")

RATE, MOMENTUM = 0.05, 0.9


def model() -> nn.Module:
    """The same model in every call and thread: threads share torch's generator."""
    made = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 2)).double()
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5, generator=generator)
    return made


def sgd(parameters, lr: float = RATE) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=lr, momentum=MOMENTUM)


def batch(rank: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + number)
    return torch.randn(3, 6, generator=generator, dtype=torch.float64)


def oracle(counts: list[int], *, divide_by_all: bool, accumulate: int = 1) -> list[Tensor]:
    """One process that trains on the batches of all ranks, round by round."""
    theirs = model()
    optimizer = sgd(theirs.parameters())
    for number in range(0, max(counts), accumulate):
        active = [rank for rank, count in enumerate(counts) if number < count]
        optimizer.zero_grad()
        for rank in active:
            for part in range(accumulate):
                loss = theirs(batch(rank, number + part)).square().mean() / accumulate
                (loss / (len(counts) if divide_by_all else len(active))).backward()
        optimizer.step()
    return [p.detach() for p in theirs.parameters()]


def max_difference(mine: nn.Module, theirs: list[Tensor]) -> float:
    return max((a.detach() - b).abs().max().item() for a, b in zip(mine.parameters(), theirs, strict=True))


@pytest.mark.covering
@pytest.mark.parametrize("divide_by_all", [True, False])
@pytest.mark.parametrize("counts", [[3, 1], [0, 2, 5], [2, 2, 2], [1, 4, 0, 4]])
def test_ranks_with_unequal_data_train_as_one_process_does(counts, divide_by_all):
    def body(comm):
        mine = model()
        plan = ff.Plan(dp=len(counts), bucket_bytes=200)
        optimizer = DistributedOptimizer(sgd(mine.parameters()), mine, plan, communicator=comm)
        with optimizer.join(divide_by_initial_world_size=divide_by_all):
            for number in range(counts[comm.rank]):
                optimizer.zero_grad()
                mine(batch(comm.rank, number)).square().mean().backward()
                optimizer.step()
        states = [optimizer.state[p]["momentum_buffer"].sum().item() for p in mine.parameters()]
        return (
            max_difference(mine, oracle(counts, divide_by_all=divide_by_all)),
            comm.all_gather_json(states),
            [p.grad for p in mine.parameters()],
        )

    for difference, states, gradients in threads.run(len(counts), body):
        assert difference <= TOLERANCE
        assert all(state == states[0] for state in states)
        assert gradients == [None] * 4


def test_unequal_data_train_with_gradient_accumulation():
    counts = [4, 2]

    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(sgd(mine.parameters()), mine, communicator=comm)
        with optimizer.join():
            for number in range(0, counts[comm.rank], 2):
                optimizer.zero_grad()
                with optimizer.no_sync():
                    (mine(batch(comm.rank, number)).square().mean() / 2).backward()
                (mine(batch(comm.rank, number + 1)).square().mean() / 2).backward()
                optimizer.step()
        return max_difference(mine, oracle(counts, divide_by_all=True, accumulate=2))

    assert max(threads.run(2, body)) <= TOLERANCE


def test_ranks_out_of_data_give_unused_parameters_no_gradient():
    def body(comm):
        layers = nn.ModuleDict({name: nn.Linear(1, 1) for name in ("always", "never")})
        plan = ff.Plan(dp=2, unused="allow")
        optimizer = DistributedOptimizer(sgd(layers.parameters()), layers, plan, communicator=comm)
        found = None
        with optimizer.join():
            for _ in range(1 + comm.rank):
                optimizer.zero_grad()
                layers["always"](torch.full((1, 1), 4.0)).sum().backward()
                gradients = (layers[name].get_parameter("weight").grad for name in ("always", "never"))
                found = [None if g is None else g.item() for g in gradients]
        return found

    assert threads.run(2, body) == [[4.0, None], [2.0, None]]  # in the second round only rank 1 has data


def test_training_continues_after_join():
    def body(comm):
        mine = model()
        optimizer = DistributedOptimizer(sgd(mine.parameters()), mine, communicator=comm)
        with optimizer.join(), pytest.raises(TrainingError, match="within join"), optimizer.join():
            pass
        with optimizer.join():
            for number in range(comm.rank):  # one rank steps, the other does not
                mine(batch(0, number)).square().mean().backward()
                optimizer.step()
        optimizer.zero_grad()
        mine(torch.full((1, 6), float(comm.rank), dtype=torch.float64)).sum().backward()
        gradient = mine.get_parameter("0.bias").grad
        assert gradient is not None
        return gradient.tolist()

    first, second = threads.run(2, body)
    assert first == second


def test_broadcast_state_gives_all_ranks_the_state_of_one():
    def body(comm):
        mine, value = model(), None
        mine.register_buffer("seen", torch.zeros(2, dtype=torch.bool))
        adam = torch.optim.AdamW(mine.parameters(), lr=RATE)
        optimizer = DistributedOptimizer(adam, mine, communicator=comm)
        if comm.rank == 1:  # as if only this rank had read a checkpoint
            for group in adam.param_groups:
                group |= {"lr": 0.5, "betas": (0.5, 0.6)}
            adam.state.clear()
            for p in mine.parameters():
                p.data.add_(1.0)
                adam.state[p] = {"step": torch.tensor(7.0), "exp_avg": p.data * 2, "exp_avg_sq": p.data**2}
            mine.get_buffer("seen").fill_(True)
            value = {"epoch": 3, "best": (0.25, None), "mask": torch.tensor([True, False])}
        value = optimizer.broadcast_state(value, src=1)
        states = [{k: v.tolist() for k, v in adam.state[p].items()} for p in mine.parameters()]
        group = {k: v for k, v in adam.param_groups[0].items() if k != "params"}
        weights = {name: tensor.tolist() for name, tensor in mine.state_dict().items()}
        value["mask"] = value["mask"].tolist()
        return states, group, weights, value

    source, *others = (threads.run(3, body)[rank] for rank in (1, 0, 2))
    assert others == [source, source]
    assert source[1]["betas"] == (0.5, 0.6)
    assert source[3] == {"epoch": 3, "best": (0.25, None), "mask": [True, False]}


def test_a_value_that_cannot_be_broadcast_is_refused_on_every_rank():
    def body(comm):
        with pytest.raises(TrainingError, match=r"the value of rank 1\n  a set"):
            broadcast_tree(comm, {"seen": {1, 2}} if comm.rank == 1 else None, src=1)
        return True

    assert threads.run(2, body) == [True, True]


def test_plan_fields_that_a_wrapped_optimizer_does_not_support_are_reported_together():
    def body(comm):
        mine = model()
        with pytest.raises(PlanError) as caught:
            DistributedOptimizer(sgd(mine.parameters()), mine, ff.Plan(dp=2, zero=1, microbatches=3), communicator=comm)
        assert [problem.got for problem in caught.value.problems] == ["zero = 1", "microbatches = 3"]
        assert [problem.attempt for problem in caught.value.problems] == ["ff.parallelize", "no_sync()"]

    threads.run(2, body)


def test_the_world_is_read_from_the_launchers_variables(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "JOB_COMPLETION_INDEX", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    assert (ff.world().rank, ff.world().size) == (0, 1)
    for name, number in {"RANK": "5", "SIZE": "8", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}.items():
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", number)
    world = ff.world()
    assert (world.rank, world.size, world.local_rank, world.local_size) == (5, 8, 1, 4)
