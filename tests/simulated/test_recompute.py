"""Laws of recompute: the same training, bit for bit, that holds less between forward and backward."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fourfold.axes.context.work import ring
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import MessageTensorGroup, TensorGroup, make_tensor_group
from fourfold.plan.check import combination_problems
from fourfold.plan.plan import Plan
from fourfold.planner.task_facts.fake_memory import PeakMemory
from fourfold.show.describe import format_recompute
from fourfold.step.recomputed_blocks import Recompute, recomputed_blocks
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.testing.oracle import TrainingResult
from fourfold.torch_kit.recompute import is_in_checkpoint, is_in_reentrant_checkpoint
from fourfold.words.errors import PlanError, TaskError, TrainingError
from tests import cases
from tests.cases import Case

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASE = Case(model="lm", batch_sizes=(4, 3), length=8, clip=0.05)
MESHES = [
    (1, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 2),
    (2, 1, 1, 1),
    (2, 1, 2, 1),
    (2, 1, 1, 2),
    (1, 2, 1, 2),
]


def make_model(**options: Any) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return (
            lm.task(**{"width": 16, "layers": 2, "heads": 4, "kv_heads": 2, "length": 8, "warmup": 0, **options})
            .model()
            .double()
        )


def train(plan: Plan, case: Case = CASE, make: Callable[[], nn.Module] = make_model) -> list[TrainingResult]:
    """By rank."""

    def body(comm: Any) -> TrainingResult:
        options: dict[str, Any] = {"clip": case.clip, "tensor": lm.TENSOR_RULES if plan.tp > 1 else {}}
        return cases.train_step(
            case, TrainStep(make(), cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm, **options)
        )

    return threads.run(plan.mesh.size, body)


@functools.cache
def trained(**fields: Any) -> list[TrainingResult]:
    return train(Plan(**fields))


@st.composite
def plans(draw: st.DrawFn) -> dict[str, Any]:
    pp, dp, cp, tp = draw(st.sampled_from(MESHES))
    fields: dict[str, Any] = {"pp": pp, "dp": dp, "cp": cp, "tp": tp, "bucket_bytes": 3000}
    fields["microbatches"] = draw(st.sampled_from([1, 2]))
    if dp * cp > 1:
        fields["zero"] = draw(st.sampled_from([0, 1, 2, 3]))
    if cp > 1:
        fields |= draw(st.sampled_from([{"ring": "zigzag"}, {"ring": "rsa"}, {"ring": "gather"}, {"ulysses": 2}]))
    if tp > 1 and pp == 1:
        fields["sequence_parallel"] = draw(st.booleans())
    if pp > 1:
        fields |= draw(st.sampled_from([{"schedule": "gpipe"}, {"schedule": "1f1b"}]))
    return fields


@settings(deadline=None, max_examples=3)
@example({"tp": 2, "dp": 2, "zero": 3, "bucket_bytes": 3000}, "full")
@example({"pp": 2, "tp": 2, "microbatches": 2}, "selective")
@example({"pp": 2, "cp": 2, "microbatches": 2, "ring": "rsa"}, "selective")
@given(plans(), st.sampled_from(["selective", "full"]))
def test_recompute_changes_no_bit_of_a_training(fields: dict[str, Any], recompute: str) -> None:
    assert not combination_problems(Plan(**fields))
    for got, kept in zip(trained(**fields, recompute=recompute), trained(**fields), strict=True):
        assert got.losses == kept.losses
        assert got.grad_norms == kept.grad_norms
        assert all(torch.equal(got.weights[name], weight) for name, weight in kept.weights.items())


class Body(nn.Module):
    """Blocks on 16 features; `Block` makes one."""

    def __init__(self, Block: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_body(*layers: Callable[[], nn.Module]) -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return Body(
            lambda: nn.Sequential(nn.Linear(16, 16), *(layer() for layer in layers), nn.Linear(16, 16))
        ).double()


def train_body(recompute: str, *layers: Callable[[], nn.Module], **fields: Any) -> TrainStep:
    """A step that has trained alone."""
    case = Case(batch_sizes=(4, 4))

    def body(comm: Any) -> TrainStep:
        torch.manual_seed(3)
        plan = Plan(recompute=recompute, **fields)
        step = TrainStep(make_body(*layers), cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm)
        for batch in cases.batches(case):
            step(batch)
        return step

    return threads.run(1, body)[0]


def state_of(step: TrainStep) -> dict[str, Tensor]:
    return {name: each.clone() for name, each in step.model.state_dict().items()}


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_the_second_forward_drops_what_the_first_one_did_and_statistics_move_once(recompute: str) -> None:
    layers = (functools.partial(nn.BatchNorm1d, 16), nn.GELU, functools.partial(nn.Dropout, 0.5))
    got, kept = (state_of(train_body(each, *layers)) for each in (recompute, "none"))
    assert got.keys() == kept.keys()
    assert all(torch.equal(got[name], each) for name, each in kept.items())
    assert int(kept["blocks.0.1.num_batches_tracked"]) == 2


def test_a_result_that_a_block_changes_in_place_cannot_be_kept() -> None:
    layers = (functools.partial(nn.ReLU, inplace=True),)
    with pytest.raises(TrainingError, match=r"the result of aten\.addmm\.default, changed in place"):
        train_body("selective", *layers)
    got, kept = (state_of(train_body(each, *layers)) for each in ("full", "none"))
    assert all(torch.equal(got[name], each) for name, each in kept.items())


class Squashed(nn.Module):
    """A result that is written as a view with a version of its own: torch makes one of a product without a bias."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x[:, None]).tanh_()[:, 0]


class Recurrent(nn.Module):
    """`nn.GRU` writes chunks of a product, which have versions of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(16, 16, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(x[:, None])[0][:, 0]


@pytest.mark.parametrize("layer", [Squashed, Recurrent])
def test_a_result_that_is_changed_through_a_view_with_a_version_of_its_own_cannot_be_kept(layer: Any) -> None:
    with pytest.raises(TrainingError, match=r"the result of aten\.(mm|addmm)\.default, changed in place"):
        train_body("selective", layer)
    got, kept = (state_of(train_body(each, layer)) for each in ("full", "none"))
    assert all(torch.equal(got[name], each) for name, each in kept.items())


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("zeroed", ["", "0.weight 0.bias"])
def test_blocks_whose_inputs_differ_on_tensor_ranks_keep_them_whole(recompute: str, zeroed: str) -> None:
    # With zeros in the column layer, all ranks have the same features in the first forward, and others later.
    case = Case(batch_sizes=(4, 4, 4))

    def body(comm: Any, recompute: str) -> TrainingResult:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = nn.Sequential(
                nn.Linear(16, 12), nn.GELU(), nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 10)
            ).double()
            for name in zeroed.split():
                nn.init.zeros_(model.get_parameter(name))
        options: dict[str, Any] = {"plan": Plan(tp=2, recompute=recompute), "tensor": {"0": "column", "2": "row"}}
        return cases.train_step(
            case, TrainStep(model, cases.loss(case), cases.optimizer(case), communicator=comm, **options)
        )

    got, kept = (threads.run(2, functools.partial(body, recompute=each))[0] for each in (recompute, "none"))
    assert got.losses == kept.losses
    assert all(torch.equal(got.weights[name], weight) for name, weight in kept.weights.items())


class TakesFeatures(nn.Module):
    """A block that some batches call with features of a tensor rank before its hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 12), nn.Linear(12, 16)

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        *given, hidden = inputs
        features = sum(given, self.up(hidden))
        return features, torch.tanh(hidden + self.down(torch.tanh(features)))


class WithFeatures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 10)
        self.blocks = nn.ModuleList([TakesFeatures(), TakesFeatures()])

    def forward(self, x: Tensor) -> Tensor:
        features, hidden = self.blocks[0](self.first(x))
        return self.head(self.blocks[1](*([features] if len(x) % 3 == 0 else []), hidden)[1])


def test_inputs_of_blocks_may_vary_from_batch_to_batch() -> None:
    case = Case(batch_sizes=(4, 6, 4), loss="pair")

    def body(comm: Any, recompute: str) -> TrainingResult:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = WithFeatures().double()
        rules, plan = {"blocks.*.up": "column", "blocks.*.down": "row"}, Plan(tp=2, recompute=recompute)
        step = TrainStep(model, cases.loss(case), cases.optimizer(case), communicator=comm, plan=plan, tensor=rules)
        return cases.train_step(case, step)

    got, kept = (threads.run(2, functools.partial(body, recompute=each))[0] for each in ("full", "none"))
    assert all(torch.equal(got.weights[name], weight) for name, weight in kept.weights.items())


class Counter(nn.Module):
    """Writes a buffer that is no statistic."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * self.calls


class Alternating(nn.Module):
    """A block that counts its forwards, and computes by the count."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        return self.layer(x) * (1 + self.calls % 3)


@pytest.mark.parametrize("recompute", ["full", "selective"])
def test_a_second_forward_has_the_numbers_of_the_first_one_and_leaves_those_that_are_there(recompute: str) -> None:
    found, expected = (train_body(each, Alternating, Alternating) for each in (recompute, "none"))
    assert [each.calls for each in found.model.modules() if isinstance(each, Alternating)] == [
        each.calls for each in expected.model.modules() if isinstance(each, Alternating)
    ]
    for name, value in state_of(expected).items():
        assert torch.equal(state_of(found)[name], value), name


def test_a_block_that_writes_a_buffer_is_refused_by_name() -> None:
    with pytest.raises(TaskError, match=r"blocks\.0, whose forward writes the buffer 1\.calls"):
        train_body("full", Counter)


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_a_block_that_changes_its_input_in_place_is_refused_by_name(recompute: str) -> None:
    def body(comm: Any) -> None:
        model = Body(lambda: nn.Sequential(nn.LeakyReLU(0.1, inplace=True), nn.Linear(16, 16))).double()
        case, plan = Case(batch_sizes=(4,)), Plan(recompute=recompute)
        step = TrainStep(model, cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm)
        with pytest.raises(TaskError, match=r"blocks\.0, whose forward changes its input in place"):
            step(cases.batches(case)[0])

    threads.run(1, body)


def test_a_model_without_blocks_is_refused_with_the_reason() -> None:
    for recompute in ("selective", "full"):
        with pytest.raises(PlanError, match="a model without a list of blocks"):
            recomputed_blocks(nn.Linear(3, 3), recompute)
    assert recomputed_blocks(nn.Linear(3, 3), "none") == ()


class Named(nn.Module):
    """A chain of named modules, the first of which has a list of its own with most of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.mid, self.up = nn.Linear(16, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.tanh(self.mid(self.down(x))))


def make_named() -> nn.Module:
    with cases.SEED_LOCK:
        torch.manual_seed(7)
        return Named().double()


def test_blocks_that_stages_name_are_the_ones_that_are_computed_again() -> None:
    plan, case = Plan(pp=2, microbatches=2, stages="down; mid up", recompute="full"), Case(batch_sizes=(4, 4))
    assert "full: 3 blocks, down to up" in format_recompute(make_named(), plan)
    kept = train(dataclasses.replace(plan, recompute="none"), case, make_named)
    for got, expected in zip(train(plan, case, make_named), kept, strict=True):
        assert all(torch.equal(got.weights[name], weight) for name, weight in expected.weights.items())


def test_outside_of_a_forward_the_blocks_are_the_users() -> None:
    step = train_body("full", nn.Tanh)
    assert all("forward" not in vars(module) for module in step.model.modules())


# ---- what is kept -------------------------------------------------------------------------------------------------


ALONE = MessageTensorGroup(CommMeter(), torch.device("cpu"))


def kept_bytes(recompute: str, *, layers: int = 4, group: TensorGroup = ALONE) -> int:
    """What autograd keeps of one forward of the model. `group`: ranks with the same model and the same inputs."""
    model = make_model(layers=layers, width=32)
    blocks = recomputed_blocks(model, recompute)
    installed = Recompute(model, blocks, group, selective=recompute == "selective").installed()
    inputs, _ = cases.batches(CASE)[0]
    counted = PeakMemory()
    counted.track("weights", model.parameters())
    weights = counted.current_bytes
    with counted, installed:
        output = model(**inputs)
    kept = counted.current_bytes - weights
    output.sum().backward()
    found = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model(**inputs).sum().backward()
    assert all(map(torch.equal, found, [p.grad for p in model.parameters() if p.grad is not None]))
    return kept


def test_full_keeps_the_inputs_of_blocks_and_selective_less_than_none() -> None:
    per_layer = {each: (kept_bytes(each, layers=6) - kept_bytes(each)) // 2 for each in ("none", "selective", "full")}
    hidden = 4 * 8 * 32 * 8  # B L D of 8 bytes
    assert per_layer["full"] == hidden
    assert hidden < per_layer["selective"] < 0.7 * per_layer["none"]


def test_each_of_two_tensor_ranks_keeps_half_of_the_inputs_of_blocks() -> None:
    def body(comm: Any) -> int:
        group = make_tensor_group(comm, "tensor", CommMeter())
        # The group makes views of its shared memory when it needs one, and these are counted too: the least has none.
        four, eight = (min(kept_bytes("full", layers=layers, group=group) for _ in range(4)) for layers in (4, 8))
        return (eight - four) // 4

    assert threads.run(2, body) == [4 * 8 * 32 * 8 // 2] * 2


@pytest.mark.parametrize(("fields", "repeats"), [({"tp": 2}, False), ({"tp": 2, "sequence_parallel": True}, True)])
def test_selective_repeats_no_sums_of_tensor_ranks_and_full_does(fields: dict[str, Any], repeats: bool) -> None:
    def sent(recompute: str) -> float:
        plan = Plan(**fields, recompute=recompute)

        def body(comm: Any) -> float:
            options: dict[str, Any] = {"plan": plan, "communicator": comm, "tensor": lm.TENSOR_RULES}
            step = TrainStep(make_model(layers=2), cases.loss(CASE), cases.optimizer(CASE), **options)
            return [step(batch).sent_bytes for batch in cases.batches(CASE)][-1]  # without what first steps compare

        return threads.run(2, body, hosts=2)[0]

    none, selective, full = map(sent, ("none", "selective", "full"))
    assert (selective > none) == repeats  # where residuals are split, tokens are gathered again
    assert full > selective


@pytest.mark.parametrize("fields", [{"ring": "zigzag"}, {"ring": "gather"}])
def test_selective_goes_round_the_ring_once_in_forward(fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[None] = []
    attend = ring._attend

    def counting(*args: Any) -> Any:
        calls.append(None)
        return attend(*args)

    monkeypatch.setattr(ring, "_attend", counting)
    counts = {}
    for recompute in ("none", "selective", "full"):
        calls.clear()
        train(Plan(cp=2, recompute=recompute, **fields), CASE)
        counts[recompute] = len(calls)
    blocks, steps, ranks = 2, 2, 2
    assert counts["selective"] == counts["none"]
    assert counts["full"] == counts["none"] + blocks * steps * ranks


def test_show_says_what_is_kept_of_each_block() -> None:
    model = make_model()
    assert "full: 2 blocks, blocks.0 to 1" in format_recompute(model, Plan(recompute="full"))
    assert "1/2 of its inputs" in format_recompute(model, Plan(recompute="full", tp=2))
    assert "sums over tensor ranks" in format_recompute(model, Plan(recompute="selective", tp=2))


# ---- checkpoints of the user's own --------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_first_forward_of_a_reentrant_checkpoint_is_told(use_reentrant: bool) -> None:
    seen: list[bool] = []

    def body(x: Tensor) -> Tensor:
        seen.append(is_in_reentrant_checkpoint() and is_in_checkpoint())
        return x.sin()

    checkpoint(body, torch.ones(3, requires_grad=True), use_reentrant=use_reentrant)
    assert seen == [use_reentrant]
    assert not is_in_checkpoint()


class Checkpointed(nn.Module):
    """A block that checkpoints itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.inner, self.use_reentrant = nn.Linear(16, 16), use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=self.use_reentrant)  # pyright: ignore[reportReturnType]


class CheckpointedBody(Body):
    """Checkpoints its blocks, which hold frozen weights, itself: each, or all in one."""

    def __init__(self, together: bool) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(16, 16).requires_grad_(False), nn.Tanh(), nn.Linear(16, 16)))
        self.together = together

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in [nn.Sequential(*self.blocks)] if self.together else self.blocks:
            x = checkpoint(block, x, use_reentrant=False)  # pyright: ignore[reportAssignmentType]
        return self.head(x)


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.parametrize("fields", [{}, {"tp": 2}])
def test_a_block_in_a_checkpoint_of_the_model_is_left_to_it(together: bool, fields: dict[str, Any]) -> None:
    # As many rows as features: torch cannot tell saved tensors of one shape from each other.
    case = Case(batch_sizes=(16, 5))

    def body(comm: Any, recompute: str) -> TrainingResult:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = CheckpointedBody(together).double()
        rules = {"blocks.*.0": "column", "blocks.*.2": "row"} if fields else {}
        plan = Plan(recompute=recompute, **fields)
        step = TrainStep(model, cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm, tensor=rules)
        return cases.train_step(case, step)

    none, *others = (
        threads.run(2 if fields else 1, functools.partial(body, recompute=each))[0]
        for each in ("none", "selective", "full")
    )
    for got in others:
        assert all(torch.equal(got.weights[name], weight) for name, weight in none.weights.items())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_pipeline_refuses_a_reentrant_checkpoint_by_name_and_takes_others(use_reentrant: bool) -> None:
    case = Case(batch_sizes=(4,))

    def body(comm: Any) -> float:
        with cases.SEED_LOCK:
            torch.manual_seed(7)
            model = Body(lambda: Checkpointed(use_reentrant)).double()
        plan = Plan(pp=2, recompute="none" if use_reentrant else "full")
        step = TrainStep(model, cases.loss(case), cases.optimizer(case), plan=plan, communicator=comm)
        return step(cases.batches(case)[0]).loss

    if not use_reentrant:
        assert len(set(threads.run(2, body))) == 1
        return
    with pytest.raises(TaskError, match=r"blocks\.\d\.inner in a reentrant checkpoint"):
        threads.run(2, body)


def test_a_model_that_checkpoints_its_blocks_itself_is_refused() -> None:
    model = make_body()
    vars(model)["gradient_checkpointing"] = True  # as transformers says it
    with pytest.raises(PlanError, match="gradient checkpointing in the model itself"):
        recomputed_blocks(model, "full")
