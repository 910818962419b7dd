"""Laws of zero 3 and hybrid sharding. Ranks are threads on one host or several, or exchange messages as over gloo."""

import dataclasses
import functools
import mmap
import threading
import time
from collections import deque
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fourfold.axes.data.rules.unshard_order import MAX_UNSHARDED, NUM_STAGING_BUFFERS
from fourfold.axes.data.rules.zero import ShardGroups, step_sent_bytes
from fourfold.axes.data.work.sharded_params import ShardedParams
from fourfold.axes.data.work.weight_storage import ShardedWeights
from fourfold.comm.collectives import Work
from fourfold.comm.meter import CommMeter
from fourfold.comm.reduce.host import HostUnsharder
from fourfold.comm.reduce.host_memory import STAGED, HostMemory, SharedMemoryLayout
from fourfold.comm.shared_regions import GroupPlace
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.torch_kit import memory
from fourfold.torch_kit.param_access import untracked_access
from fourfold.words.errors import PlanError, TaskError, TrainingError
from fourfold.words.program import Verb, bucket_of
from tests.cases import SEED_LOCK, Case, batches, build_step, deviation, local_batch, model, train_oracle, train_step
from tests.checkpoint_runs import ThreadRun


@pytest.fixture(autouse=True)
def _believe_the_task(request):
    if request.function is not test_unshard_orders_are_the_same_on_every_rank_and_fixed_once_recorded:
        request.getfixturevalue("without_dry_run")


@dataclasses.dataclass(frozen=True)
class Topology:
    """The number of ranks and hosts, the size of a shard group, and the transport."""

    size: int
    hosts: int = 1
    shard: int | None = None
    transport: str = "auto"

    def run(self, body):
        return threads.run(self.size, body, hosts=self.hosts)

    def case(self, **fields):
        return Case(**({"zero": 3, "shard": self.shard, "transport": self.transport, "bucket_bytes": 1500} | fields))


SEEDING = threading.Lock()  # ranks are threads, and share torch's generator
GLOO, HOSTS = Topology(3, transport="gloo"), Topology(4, hosts=2)
HYBRID = Topology(4, shard=2, transport="gloo")


@pytest.mark.parametrize("topology", [GLOO, HOSTS, HYBRID])
@pytest.mark.parametrize("batch_sizes", [(1, 9), (9, 1, 2)])
def test_a_rank_without_samples_contributes_its_shards(topology, batch_sizes):
    # If the first batch has one sample, all ranks but one have none when the unshard order is recorded.
    case = topology.case(batch_sizes=batch_sizes, microbatches=2)
    assert max(topology.run(lambda comm: deviation(case, topology.size, comm))) <= TOLERANCE


@pytest.mark.parametrize("topology", [Topology(3, transport="gloo"), Topology(6, hosts=3)])
@pytest.mark.parametrize(("sizes", "microbatches"), [((5, 5, 5, 5), 1), ((4, 7, 5), 2)])
def test_ranks_may_use_weights_in_different_orders(topology, sizes, microbatches):
    # The spare layer is used for batches of even length only: by different ranks in different steps.
    case = topology.case(
        model="sometimes", unused="allow", batch_sizes=sizes, bucket_bytes=1, microbatches=microbatches
    )
    same = dataclasses.replace(case, zero=0, shard=None)

    def body(case, comm):
        return train_step(case, build_step(case, topology.size, comm))

    expected = topology.run(functools.partial(body, same))
    for got, whole in zip(topology.run(functools.partial(body, case)), expected, strict=True):
        assert oracle.deviation(got, whole) <= TOLERANCE


def test_an_operation_may_need_more_buckets_than_are_unsharded_otherwise():
    case = GLOO.case(model="many at once", bucket_bytes=1, batch_sizes=(8, 8))
    assert max(GLOO.run(lambda comm: deviation(case, GLOO.size, comm))) <= TOLERANCE


WIDTH = 48


class OrderDependsOnSamples(nn.Module):
    """Layers whose order depends on the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers if x[0, 0] > 0 else reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.parametrize("topology", [Topology(2, transport="gloo"), HOSTS])
def test_ranks_may_use_their_layers_in_opposite_orders(topology):
    def body(zero, comm):
        with SEEDING, torch.random.fork_rng():
            torch.manual_seed(3)
            module = OrderDependsOnSamples().double()
        plan = Plan(dp=topology.size, zero=zero, transport=topology.transport, bucket_bytes=1)
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        step = TrainStep(module, F.mse_loss, sgd, plan=plan, communicator=comm, clip=None)
        x, y = ones()
        losses = [step((x if comm.rank < topology.size // 2 else -x, y)).loss for _ in range(3)]
        return losses, {name: weight.clone() for name, weight in step.named_weights()}

    for (losses, weights), (expected_losses, others) in zip(
        topology.run(functools.partial(body, 3)), topology.run(functools.partial(body, 0)), strict=True
    ):
        assert losses == pytest.approx(expected_losses, abs=TOLERANCE)
        for name, weight in others.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


class Deep(nn.Module):
    """Many equal layers, each in its own bucket."""

    def __init__(self, depth: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(depth))
        self.kept: list[torch.Tensor] = []
        self.keeps = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.requires_grad_()  # so that backward needs the first layer's weight too
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if self.keeps:
                self.kept.append(layer.get_parameter("weight").detach())
        return x


def deep(comm, topology, **fields) -> TrainStep:
    with SEEDING, torch.random.fork_rng():
        torch.manual_seed(3)
        module = Deep().double()
    plan = Plan(dp=topology.size, zero=3, shard=topology.shard, transport=topology.transport, bucket_bytes=1, **fields)
    return TrainStep(
        module, F.mse_loss, functools.partial(torch.optim.SGD, lr=0.1), plan=plan, communicator=comm, clip=None
    )


def sharded_params_of(step: TrainStep) -> ShardedParams:
    storage = step._weights.storage
    assert isinstance(storage, ShardedWeights)
    return storage.sharded_params


def ones(rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(rows, WIDTH, dtype=torch.float64), torch.zeros(rows, WIDTH, dtype=torch.float64)


@pytest.mark.parametrize("topology", [GLOO, HOSTS])
def test_few_buckets_are_unsharded_at_a_time(topology):
    def body(comm):
        step = deep(comm, topology)
        slots = sharded_params_of(step).buffer_pool
        for _ in range(3):
            step(ones())
            assert slots.num_in_use == 0
        return slots.peak_in_use, len(slots._free), len(step.buckets)

    for peak, kept, num_buckets in topology.run(body):
        assert num_buckets == 12
        # The unsharded ones, one that is prefetched, and one that backward still views when it is resharded.
        assert peak <= MAX_UNSHARDED + 2
        assert kept <= peak


@pytest.mark.parametrize(("topology", "microbatches"), [
    (GLOO, 1), (HOSTS, 3), (Topology(4, hosts=2, shard=2), 1), (HYBRID, 3),
])  # fmt: skip
def test_sent_bytes_equal_the_formula(topology, microbatches):
    def body(comm):
        step = deep(comm, topology, microbatches=microbatches)
        step.dry_run(ones(6), training=True)  # it runs its own forwards, once
        return [step(ones(6)).sent_bytes for _ in range(3)], step.buckets

    size, shard = topology.size // topology.hosts, (topology.shard or topology.size) // topology.hosts
    for sent, buckets in topology.run(body):
        expected = step_sent_bytes(
            buckets, zero=3, shard_groups=ShardGroups(shard, size // shard), microbatches=microbatches
        )
        # Each rank of a host sends its slice.
        assert sent[-1] == pytest.approx(expected / topology.hosts, rel=1e-9)
        assert sent[0] == sent[-1]  # also while the order is recorded


def test_a_resharded_parameter_holds_no_memory_and_reads_as_nan():
    def body(comm):
        step = deep(comm, GLOO)
        step(ones())
        for parameter in step.model.parameters():
            with untracked_access():
                assert parameter.isnan().all()
                assert parameter.untyped_storage().nbytes() == parameter.element_size()
        first = dict(step.model.named_parameters())["layers.0.weight"]
        assert (first.shape, first.dtype, first.requires_grad) == ((WIDTH, WIDTH), torch.float64, True)
        assert first.is_leaf
        return sum(shard.flat.numel() for shard in sharded_params_of(step).shards)

    held = GLOO.run(body)
    assert held == [12 * WIDTH * WIDTH / 3] * 3


def test_a_kept_view_never_shows_another_bucket():
    def body(comm):
        step = deep(comm, GLOO)
        module: Any = step.model
        step.dry_run(ones(), training=True)
        module.keeps = True
        before = {name: weight.clone() for name, weight in reversed(list(step.named_weights()))}
        step(ones())
        assert all(map(torch.equal, module.kept, before.values()))
        assert sharded_params_of(step).buffer_pool.num_in_use == 12
        module.kept.clear()
        assert sharded_params_of(step).buffer_pool.num_in_use == 0

    GLOO.run(body)


def test_unshard_orders_are_the_same_on_every_rank_and_fixed_once_recorded():
    def body(comm):
        step = deep(comm, GLOO)
        step(ones(0 if comm.rank == 0 else 2))
        for kind in ("try out", "judge"):
            del sharded_params_of(step).unshard_orders[kind, 0]
        recorded = {kind: list(order.buckets) for (kind, _), order in sharded_params_of(step).unshard_orders.items()}
        step(ones())
        again = {kind: list(order.buckets) for (kind, _), order in sharded_params_of(step).unshard_orders.items()}
        assert recorded == again
        return recorded

    first, *others = GLOO.run(body)
    assert all(other == first for other in others)
    assert first == {"forward": list(reversed(range(12))), "backward": list(range(12))}


class Wandering(nn.Module):
    """Uses its layers in an order that can be changed between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.order = [0, 1, 2]

    def forward(self, x):
        for index in self.order:
            x = torch.tanh(self.layers[index](x))
        return x


def test_weights_used_out_of_turn_train_as_on_one_device_are_counted_and_enter_the_program():
    orders = [[0, 1, 2], [0, 1, 2], [2, 0, 1], [2, 0, 1]]

    def train(step):
        seen = []
        for order in orders:
            step.model.order = order
            metrics = step(ones())
            unshards = [bucket_of(action, 6) for action in step.program if action.verb == Verb.UNSHARD]
            seen.append((metrics.loss, metrics.out_of_turn, unshards))
        return seen

    def body(comm):
        with SEED_LOCK:
            torch.manual_seed(0)
            module = Wandering().double()
        plan = Plan(dp=comm.size, zero=3, transport="gloo", bucket_bytes=1)
        sgd = functools.partial(torch.optim.SGD, lr=0.1)
        return train(TrainStep(module, F.mse_loss, sgd, plan=plan, communicator=comm, same_batches="allow"))

    (alone,), ranks = threads.run(1, body), threads.run(3, body)
    for first, second, third, fourth in ranks:
        losses = [first[0], second[0], third[0], fourth[0]]
        assert losses == pytest.approx([loss for loss, _, _ in alone], rel=1e-12)
        assert [seen[1] for seen in (first, second, fourth)] == [0, 0, 0]
        assert third[1] > 0  # known to be needed only when it was used
        assert first[2] == second[2] != third[2] == fourth[2]
        assert set(range(6)) == set(first[2])


def test_the_all_gather_of_a_bucket_begins_before_the_bucket_is_used():
    def body(comm):
        step = deep(comm, GLOO)
        step(ones())
        sharded_params = sharded_params_of(step)
        use, ahead = sharded_params.ensure_unsharded, []

        def watched(bucket):
            assert sharded_params._phase is not None
            pending = sharded_params._phase.pending
            ahead.append(pending[0].bucket == bucket if pending else False)
            use(bucket)

        sharded_params.ensure_unsharded = watched
        step(ones())
        return ahead

    for ahead in GLOO.run(body):
        assert ahead == [True] * (2 * 12)


class ModifiesSavedTensor(nn.Module):
    """Modifies in place a tensor that backward needs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = self.layer(x)
        z = y * y
        y.add_(1.0)
        return z


def test_a_tensor_saved_for_backward_may_not_be_modified():
    def body(comm):
        plan = Plan(dp=3, zero=3, transport="gloo")
        step = TrainStep(
            ModifiesSavedTensor().double(), F.mse_loss, torch.optim.SGD, plan=plan, communicator=comm, clip=None
        )
        with pytest.raises(TrainingError, match=r"needs has changed since forward \(version \d+ in forward, \d+ now\)"):
            step(ones())
        return True

    assert all(GLOO.run(body))


def test_a_backward_outside_a_step_is_refused():
    def body(comm):
        step = deep(comm, GLOO)
        x, y = ones()
        with sharded_params_of(step).phase("forward"):
            total = step.model(x).sum()
        with pytest.raises(TrainingError, match="a backward outside of a step"):
            total.backward()
        return y is not None

    assert all(GLOO.run(body))


def test_a_weight_changed_since_forward_is_found_in_backward():
    def body(comm):
        step = deep(comm, GLOO)
        sharded_params = sharded_params_of(step)
        with sharded_params.phase("forward"):
            total = step.model(ones()[0]).sum()
        torch.autograd.graph.increment_version(list(step.model.parameters()))
        with sharded_params.phase("backward"), pytest.raises(TrainingError, match="a weight that backward needs"):
            total.backward()
        return True

    assert all(GLOO.run(body))


@pytest.mark.parametrize("topology", [GLOO, HOSTS])
def test_weights_can_be_read_edited_loaded_and_evaluated(topology):
    case = topology.case(batch_sizes=(12, 12))

    def body(comm):
        step = build_step(case, topology.size, comm)
        name = "second.weight"
        with step.edit() as module:
            module.get_parameter(name).fill_(float(comm.rank + 2))
        assert dict(step.named_weights())[name].unique().tolist() == [2.0]
        step.load_weights({name: torch.full((24, 24), 0.25, dtype=torch.float64)})
        assert dict(step.named_weights())[name].unique().tolist() == [0.25]
        plain = model("mlp")
        plain.load_state_dict(step.state_dict()["model"])
        batch = batches(case)[0]
        evaluated = step.evaluate(local_batch(batch, topology.size, step.dp_index)).loss
        expected = F.cross_entropy(plain(batch[0]), batch[1]).item()
        assert evaluated == pytest.approx(expected, abs=1e-12)
        with step.unsharded() as module:
            for _ in range(2 if comm.rank == 0 else 0):
                torch.testing.assert_close(module(batch[0]), plain(batch[0]))
        return train_step(case, step).losses

    first, *others = topology.run(body)
    assert all(other == first for other in others)


def test_an_edit_outside_step_edit_is_found():
    def body(comm):
        step = deep(comm, GLOO)
        next(iter(step.model.parameters())).data = torch.ones(WIDTH, WIDTH, dtype=torch.float64)
        with pytest.raises(TaskError, match="another storage than before"):
            step(ones())
        return True

    assert all(GLOO.run(body))


def test_a_copy_of_the_model_has_plain_parameters():
    def body(comm):
        import copy

        step = deep(comm, GLOO)
        with step.edit() as module:
            model_copy = copy.deepcopy(module)
        assert all(type(p) is nn.Parameter for p in model_copy.parameters())
        return not any(p.isnan().any() for p in model_copy.parameters())

    assert all(GLOO.run(body))


MESHES = [GLOO, HOSTS, Topology(4, hosts=2, shard=2), HYBRID, Topology(2)]


RESUMED = {"batch_sizes": (12, 12, 12, 12), "clip": 0.5, "model": "tied"}
RESUMPTIONS = [
    (saved_on, loaded_on, zero)
    for saved_on, loaded_on in zip(MESHES, MESHES[2:] + MESHES[:2], strict=True)
    for zero in (range(4) if loaded_on.shard is None else range(1, 4))
]


@functools.cache
def state_dicts(saved_on):
    """Those of all ranks, after two steps."""
    case = saved_on.case(**RESUMED)

    def begin(comm):
        step = build_step(case, saved_on.size, comm)
        for batch in batches(case)[:2]:
            step(local_batch(batch, saved_on.size, step.dp_index))
        return step.state_dict()

    return saved_on.run(begin)


@pytest.mark.usefixtures("without_dry_run")
@pytest.mark.parametrize(("saved_on", "loaded_on", "loaded_zero"), RESUMPTIONS)
def test_a_state_dict_loads_at_other_zero_levels_ranks_and_shard_groups(saved_on, loaded_on, loaded_zero):
    state, *others = state_dicts(saved_on)
    for other in others:
        for name, weight in state["model"].items():
            assert torch.equal(weight, other["model"][name])
    resumed_case = loaded_on.case(**RESUMED, zero=loaded_zero, bucket_bytes=4000)

    def resume(comm):
        step = build_step(resumed_case, loaded_on.size, comm)
        step.load_state_dict(state)
        return train_step(resumed_case, step, skip=2)

    expected = train_oracle(saved_on.case(**RESUMED))
    for trained in loaded_on.run(resume):
        assert trained.losses == pytest.approx(expected.losses[2:], abs=TOLERANCE)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(trained.weights[name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("saved_on", "loaded_on"), [(GLOO, GLOO), (HYBRID, HYBRID), (HOSTS, GLOO), (GLOO, Topology(2)), (HYBRID, HOSTS)]
)
def test_checkpoints_of_sharded_weights_load_on_any_mesh(saved_on, loaded_on, tmp_path):
    case = saved_on.case(batch_sizes=(12,) * 4, clip=0.5, model="tied")

    def begin(comm):
        run = ThreadRun(case, comm, tmp_path, ema=0.5)
        run.run_steps(0, 2, save_at=(2,))
        run.run_steps(2, 4)
        return oracle.snapshot(run.step, [], [])

    def resume(comm):
        run = ThreadRun(
            loaded_on.case(batch_sizes=(12,) * 4, clip=0.5, model="tied"), comm, tmp_path, token="b", ema=0.5
        )
        assert run.checkpoints.resume() is not None
        run.run_steps(2, 4)
        return oracle.snapshot(run.step, [], [])

    whole, expected = saved_on.run(begin), train_oracle(case)
    for trained in loaded_on.run(resume):
        for name, weight in expected.weights.items():
            torch.testing.assert_close(trained.weights[name], weight, rtol=0, atol=TOLERANCE)
            if saved_on == loaded_on:
                assert torch.equal(trained.weights[name], whole[0].weights[name])


@pytest.mark.parametrize("topology", [GLOO, HOSTS, HYBRID])
def test_two_byte_weights_are_all_gathered_and_float32_master_weights_are_trained(topology):
    # In bf16 the order of sums matters, so the weights are only near those of zero 1.
    fields: dict[str, Any] = {"batch_sizes": (12, 12, 12), "precision": "bf16", "clip": 0.5}

    def body(case, comm):
        step = build_step(case, topology.size, comm)
        for batch in batches(case):
            step(local_batch(batch, topology.size, step.dp_index))
        return {name: weight.clone() for name, weight in step.named_weights()}, step.state_dict()["model"]

    split = topology.run(functools.partial(body, topology.case(**fields)))
    whole = topology.run(functools.partial(body, topology.case(**(fields | {"zero": 1, "shard": None}))))
    for (weights, saved), (expected, _) in zip(split, whole, strict=True):
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=2e-2)
            assert torch.equal(weights[name], saved[name].view_as(weights[name]))
            assert not torch.equal(weights[name], weights[name].bfloat16().to(weights[name].dtype))


def test_shard_groups_that_straddle_hosts_are_refused_with_sizes_that_fit():
    case = Case(zero=3, shard=3)
    with pytest.raises(PlanError, match=r"shard = 3 on 3 hosts of 2 ranks .* try shard = 2, 6, or transport"):
        threads.run(6, lambda comm: build_step(case, 6, comm), hosts=3)


NUM_GATHERS = 12


def test_a_staging_buffer_is_reused_only_after_all_ranks_have_copied_it():
    layout = SharedMemoryLayout([8], [torch.float32], staging_dtypes=[torch.float32])
    mapping = mmap.mmap(-1, layout.total_bytes(2))

    class Hosts:
        """Of `ShardedCollectives`, what a rank needs whose slices come from other hosts at once."""

        def all_gather_async(self, shard: torch.Tensor, out: torch.Tensor) -> Work:
            out.copy_(shard)
            return Work(lambda: out)

    def body(comm):
        place = GroupPlace(comm.rank, (0, 1))
        host = HostMemory(mapping, layout, place, CommMeter(), check_peers=lambda: None)
        wait, found, waits = host.wait, [], deque()
        if comm.rank:  # slow to copy what is staged
            host.wait = lambda flag, count: (wait(flag, count), time.sleep(0.002 if flag == STAGED else 0.0))[0]
        unsharder = HostUnsharder(host, [(4 * comm.rank, 4 * comm.rank + 4)], cast(Any, Hosts()))
        for number in range(NUM_GATHERS):
            found.append(torch.zeros(8))
            waits.append(unsharder.unshard_async(0, torch.full((4,), 2.0 * number + comm.rank), found[-1], None))
            if len(waits) == NUM_STAGING_BUFFERS:
                waits.popleft()()
        for each in waits:
            each()
        return [out.tolist() for out in found]

    expected = [[2.0 * number] * 4 + [2.0 * number + 1] * 4 for number in range(NUM_GATHERS)]
    assert threads.run(2, body) == [expected] * 2


def test_a_buffer_returns_to_the_pool_when_its_storage_is_unreferenced():
    slots = memory.BufferPool()
    flat = slots.acquire(1000, torch.float32, torch.device("cpu"))
    address, view = flat.data_ptr(), flat[10:20].view(2, 5)
    del flat
    other = slots.acquire(1000, torch.float32, torch.device("cpu"))
    assert other.data_ptr() != address
    assert slots.num_in_use == 2
    del view
    assert slots.num_in_use == 1
    assert slots.acquire(500, torch.float64, torch.device("cpu")).data_ptr() == address


def test_a_free_buffer_that_is_too_small_is_dropped():
    slots = memory.BufferPool()
    for size in (10_000, 20_000, 40_000):
        slots.acquire(size, torch.float32, torch.device("cpu"))
    assert (len(slots._free), slots.peak_in_use) == (1, 1)
