"""Laws of `fourfold verify`: it passes correct training, names deviations, and reports what it leaves out."""

import dataclasses
import functools
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fourfold as ff
from fourfold.cli import verify as command
from fourfold.cli.job import Job
from fourfold.cli.run import Run
from fourfold.comm.codec.int8 import Int8
from fourfold.comm.collectives import sum_in_order
from fourfold.comm.reduce import host
from fourfold.feed.source import TensorSource
from fourfold.model.loss_sum import Loss, sum_loss
from fourfold.model.objective import Objective
from fourfold.plan.plan import Plan
from fourfold.proof.float64_mode import Float64Mode
from fourfold.testing import oracle
from fourfold.verification.command import check_verifiable, verify
from fourfold.verification.comparison import EXACT_BOUND, TOLERANCE, Comparison, VerifyResult
from fourfold.verification.one_device import copy_with_hooks, mesh_state
from fourfold.words.errors import PlanError
from fourfold.words.task import Data, Task


class Net(nn.Module):
    """Eight features, three classes; dropout as a module or a number, a random factor, or a softmax in float32."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.second, self.kind = nn.Linear(8, 16), nn.Linear(16, 3), kind
        self.module, self.dropout = nn.Dropout(0.5 if kind == "module" else 0.0), 0.5 if kind == "number" else 0.0

    def forward(self, x: Tensor) -> Tensor:
        x = self.module(self.first(x))
        x = F.dropout(x, self.dropout, self.training)
        if self.kind == "narrow":
            x = x.to(torch.float32).softmax(-1, dtype=torch.float32) + x.float()
        if self.kind == "draws":
            x = x * torch.rand(())
        return self.second(x.to(self.second.weight.dtype))


def task(kind: str = "plain", **fields) -> Task:
    torch.manual_seed(0)
    data = Data(train=TensorSource(torch.randn(64, 8), torch.randint(0, 3, (64,))))
    return Task(
        loss=functools.partial(F.cross_entropy, reduction="none"),
        data=lambda: data,
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-2),
        schedule=lambda step, steps: 1.0 - step / steps,
        **{"model": functools.partial(Net, kind), "steps": 3, "batch_size": 16, "clip": 0.5, **fields},
    )


class Complex(nn.Module):
    """A complex filter and a complex buffer; the gradient of `phase` has an imaginary part only."""

    rotation: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, 16, dtype=torch.complex64) * 0.3)
        self.phase = nn.Parameter(torch.randn(16, dtype=torch.complex64))
        self.register_buffer("rotation", torch.polar(torch.ones(16), torch.arange(16.0)))
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        z = x.to(torch.complex64) @ self.filter * self.rotation
        return self.head((z * torch.exp(1j * z.real.to(torch.complex64))).abs() + self.phase.imag)


PLANS = [Plan(), Plan(microbatches=3), Plan(bucket_bytes=100), Plan(update="in_backward", microbatches=2)]


@pytest.mark.covering
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["plain", "module", "number", "narrow"])
def test_a_correct_training_passes(kind, plan):
    verdict = verify(task(kind, clip=0.5 if plan.update == "after" else None), plan)
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE
    assert verdict.ok
    assert (
        verdict.worst["weight"].keys()
        == verdict.worst["gradient"].keys()
        == {n for n, _ in Net(kind).named_parameters()}
    )
    assert len(verdict.losses) == 3
    assert verdict.num_dropouts == (kind in ("module", "number"))
    assert not verdict.randomness


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_weights_that_hooks_compute_are_copied():
    def model() -> nn.Module:
        net = Net("plain")
        nn.utils.weight_norm(net.second)
        return net

    verdict = verify(task(model=model), Plan())
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE


@pytest.mark.parametrize("plan", PLANS)
def test_complex_parameters_are_compared_in_complex128(plan):
    seen = set()

    class Watched(Complex):
        def forward(self, x: Tensor) -> Tensor:
            seen.update(t.dtype for t in (x, self.filter, self.phase, self.rotation, self.head.weight))
            return super().forward(x)

    verdict = verify(task(model=Watched, clip=0.5 if plan.update == "after" else None), plan)
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE
    assert seen == {torch.float64, torch.complex128}


def test_a_wrong_imaginary_part_is_found():
    with mock.patch.object(Objective, "sum_loss", wrong_loss_sum):
        verdict = verify(task(model=Complex), Plan())
    assert verdict is not None
    assert verdict.worst["gradient"]["phase"].value > 1e-7


def test_the_oracle_compares_imaginary_parts():
    a, b = (oracle.TrainingResult([], [], {"w": torch.tensor([1.0 + part * 1j])}) for part in (1.0, 1.5))
    assert oracle.deviation(a, b) == pytest.approx(0.5 / abs(1.0 + 1.5j))


def wrong_loss_sum(objective, value, calls, samples):
    loss = sum_loss(value, samples)
    return Loss(loss.total * 1.0001, loss.count)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_nonfinite_number_is_an_infinite_deviation(value):
    good, bad = (oracle.TrainingResult([1.0, number], [], {"w": torch.ones(2)}) for number in (1.0, value))
    assert oracle.deviation(good, good) == 0.0
    for pair in ((bad, good), (good, bad), (bad, bad)):
        assert oracle.deviation(*pair) == float("inf")


def test_a_wrong_gradient_is_found_in_every_loss_and_gradient():
    with mock.patch.object(Objective, "sum_loss", wrong_loss_sum):
        verdict = verify(task(), Plan())
    assert verdict is not None
    assert min(deviation for deviation, _ in verdict.losses) > 1e-6
    assert min(each.value for each in verdict.worst["gradient"].values()) > 1e-7
    assert not verdict.ok


def test_a_model_that_draws_random_numbers_is_named_and_nothing_else_is_said_to_deviate():
    verdict = verify(task("draws"), Plan())
    assert verdict is not None
    assert verdict.randomness == ["the model (Net)"]
    with mock.patch.object(Objective, "sum_loss", wrong_loss_sum):
        verdict = verify(task("draws"), Plan())
    assert verdict is not None
    (problem,) = verdict.problems
    assert problem.got == "random numbers drawn by the model (Net): each mesh draws others"


class Counting(nn.Linear):
    """A buffer that grows with each forward, saved or not, which the output depends on or not."""

    seen: Tensor

    def __init__(self, *, saved: bool, used: bool) -> None:
        super().__init__(8, 3)
        self.used = used
        self.register_buffer("seen", torch.zeros(()), persistent=saved)

    def forward(self, input: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.seen += input.abs().sum()
        return super().forward(input) * (1.0 + 1e-3 * self.seen.detach() if self.used else 1.0)


def buffers_lost(step, state):
    """As `mesh_state`, where a rank keeps its buffer as it was."""
    found = mesh_state(step, state)
    return {
        kind: {n: b * 0.0 for n, b in named.items()} if "buffer" in kind else named for kind, named in found.items()
    }


@pytest.mark.parametrize("saved", [True, False])
def test_a_buffer_that_differs_is_named_with_its_step(saved):
    model = functools.partial(Counting, saved=saved, used=False)
    whole = verify(task(model=model), Plan())
    with mock.patch("fourfold.verification.one_device.mesh_state", buffers_lost):
        lost = verify(task(model=model), Plan())
    assert whole is not None
    assert lost is not None
    assert whole.ok
    kind = "buffer" if saved else "unsaved buffer"
    assert f"the {kind} of seen deviates by" in str([*lost.problems, *lost.lines()])
    assert "at step 1, the first" in str([*lost.problems, *lost.lines()])
    assert lost.ok == (not saved)  # what no state dict has and nothing depends on


def table(verdict: VerifyResult) -> str:
    return "\n".join(verdict.lines())


def compared(*steps: tuple[float, float], **fields) -> VerifyResult:
    """A comparison of a loss and a weight, which deviate by these numbers, by step."""
    result = VerifyResult("lm on dp 2 × cp 2, compared with one device: 3 steps in float64", **fields)
    comparison, zero = Comparison(result), torch.zeros((), dtype=torch.float64)
    for number, (loss, weight) in enumerate(steps, 1):
        got = {"loss": {"": zero + loss}, "weight": {"a": zero + weight, "b": zero}}
        comparison.add(number, got, {"loss": {"": zero}, "weight": {"a": zero, "b": zero}})
    return result


def test_the_table_shows_what_was_compared_and_what_was_left_out():
    text = table(compared((1e-12, 1e-5), (1e-12, float("nan")), num_dropouts=2, randomness=["block (Noisy)"]))
    assert text.startswith("lm on dp 2 × cp 2, compared with one device: 3 steps in float64")
    assert "  a            inf*" in text
    assert "  b        0.0e+00" in text
    assert "largest deviation inf" in text
    assert "bound: 1e-09" in text
    assert "dropout is left out" in text
    assert "block (Noisy) draws random numbers" in text
    assert "trains as one device does" not in text
    assert "trains as one device does" in table(compared((0.0, 1e-10)))


def test_deviations_are_named_and_give_exit_code_1():
    verdict = compared((1e-12, 0.0), (1e-3, 1e-5), (1e-3, float("nan")))
    job = Job(Run(), task=task(), plan=Plan(), settings={"task_name": "lm"}, identity={})
    with (
        mock.patch("fourfold.verification.command.verify", return_value=verdict),
        pytest.raises(command.VerifyError) as caught,
    ):
        command.verify(job)
    assert caught.value.exit_code == 1
    assert "the weight of a deviates by 1.0e-05 at step 2, the first" in str(caught.value)
    assert "the loss deviates by 1.0e-03 at step 2, the first" in str(caught.value)


def test_a_comparison_of_nothing_is_not_ok():
    assert not VerifyResult("script.py").ok


# ---- other precisions, and codecs -------------------------------------------------------------------------

LOSSY = [
    {"precision": "bf16"},
    {"precision": "bf16", "reduce_dtype": "fp32", "zero": 2, "microbatches": 2},
    {"reduce_dtype": "bf16"},
    *({"codec": codec} for codec in ("bf16", "int8", "topk", "powersgd", "dct")),
    {"codec": "topk", "zero": 2, "microbatches": 2},
]


def global_batches(count: int = 3) -> list:
    generator = torch.Generator().manual_seed(7)
    return [(torch.randn(16, 8, generator=generator), torch.randint(0, 3, (16,), generator=generator))] * count


def unreduced(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def verified(**fields) -> VerifyResult:
    """`ff.verify` of two ranks."""
    torch.manual_seed(0)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    return ff.verify(Net("plain"), unreduced, optimizer, global_batches(), ff.Plan(dp=2, **fields))


@pytest.mark.parametrize("fields", LOSSY, ids=str)
def test_a_plan_in_another_precision_is_compared_within_the_bound_of_that_precision(fields):
    verdict = verified(**fields)
    assert verdict.ok, str(verdict)
    assert "bound: " in str(verdict)
    assert ("add up to the gradient" in verdict.bound) == (fields.get("codec") in ("int8", "topk", "powersgd", "dct"))


def without_the_last_rank(addends: list[Tensor], out: Tensor) -> None:
    """As `sum_in_order`, without one addend."""
    sum_in_order(addends[:-1], out=out)


def forgetting(codec: Int8, flat: Tensor) -> Tensor:
    """As `Int8.encode`, without error feedback."""
    codec.residual.zero_()
    return ENCODE(codec, flat)


def twice(codec: Int8, payload: Tensor, out: Tensor) -> None:
    """As `Int8.decode_add`, twice."""
    for _ in range(2):
        DECODE_ADD(codec, payload, out)


ENCODE, DECODE_ADD = Int8.encode, Int8.decode_add
BROKEN = {
    "exact": ({}, mock.patch.object(host, "sum_in_order", without_the_last_rank), 1),
    "bf16": ({"precision": "bf16"}, mock.patch.object(host, "sum_in_order", without_the_last_rank), 1),
    "codec bf16": ({"codec": "bf16"}, mock.patch.object(host, "sum_in_order", without_the_last_rank), 1),
    "reduce bf16": (
        {"reduce_dtype": "bf16"},
        mock.patch.object(host, "sum_in_order", without_the_last_rank),
        1,
    ),
    "no feedback": ({"codec": "int8"}, mock.patch.object(Int8, "encode", forgetting), 2),
    "twice": ({"codec": "int8"}, mock.patch.object(Int8, "decode_add", twice), 1),
}


@pytest.mark.parametrize("codec", ["int8", "bf16"])
def test_a_mean_over_tokens_is_compared_with_a_codec(codec):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20), nn.Flatten(0, 1))
    tokens = [torch.randint(0, 20, (size, 6)) for size in (8, 12, 8)]
    batches = [(each, each.flatten().view(each.shape)) for each in tokens]

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets.flatten())

    verdict = ff.verify(model, loss, functools.partial(torch.optim.SGD, lr=0.1), batches, ff.Plan(dp=2, codec=codec))
    assert verdict.ok, str(verdict)


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_reduction_is_beyond_every_bound(kind):
    fields, broken, first_step = BROKEN[kind]
    with broken:
        verdict = verified(**fields)
    assert not verdict.ok
    assert f"at step {first_step}, the first" in next(each.got for each in verdict.problems if "gradient" in each.got)


def test_verify_leaves_model_optimizer_and_random_state_as_they_are():
    torch.manual_seed(0)
    model, state = Net("module"), torch.get_rng_state()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for plan in (ff.Plan(), ff.Plan(dp=2, zero=1)):
        verdict = ff.verify(model, unreduced, optimizer, iter(global_batches()), plan, clip=0.5, steps=2)
        assert verdict.ok
        assert verdict.num_steps == 2
        assert verdict.bound == EXACT_BOUND
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert model.module.p == 0.5


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_a_copy_of_a_model_has_the_hooks_of_its_parameters(register):
    model, seen = Net("plain"), set()
    for parameter in model.parameters():
        getattr(parameter, register)(lambda tensor: seen.add(tensor.shape))
    copy_with_hooks(model, torch.optim.SGD)[0](torch.ones(1, 8)).sum().backward()
    assert seen == {p.shape for p in model.parameters()}


def test_a_hook_of_each_rank_that_clamps_what_it_has_accumulated_is_no_correct_training():
    def clamp(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.clamp_(-1e-3, 1e-3)

    def model() -> nn.Module:
        made = Net("plain")
        for parameter in made.parameters():
            parameter.register_post_accumulate_grad_hook(clamp)
        return made

    verdict = verify(task(model=model), Plan(microbatches=2))
    assert verdict is not None
    assert not verdict.ok


@pytest.mark.parametrize("options", [{}, {"foreach": False}])
def test_an_option_that_is_a_tensor_in_float32_is_compared_in_float64(options):
    adam = functools.partial(torch.optim.Adam, lr=torch.tensor(0.1), **options)
    for plan in (Plan(), Plan(dp=2)):
        verdict = ff.verify(Net("plain"), unreduced, adam, global_batches() * 4, plan, steps=8)
        assert verdict.ok


def test_a_plan_with_two_roundings_is_refused():
    with pytest.raises(PlanError, match="each would hide the other"):
        verified(codec="topk", precision="bf16")


@pytest.mark.parametrize(
    "plan",
    [
        Plan(dp=2, sync="local"),
        Plan(batch_norm="local"),
        Plan(pp=2, edge="bf16"),
        Plan(pp=2, schedule="pipedream"),
    ],
)
def test_plans_that_change_the_training_are_refused_with_the_reason(plan):
    with pytest.raises(PlanError, match="no plan"):
        ff.verify(Net("plain"), unreduced, functools.partial(torch.optim.SGD, lr=0.1), global_batches(), None)  # type: ignore[arg-type]
    with pytest.raises(PlanError, match="trains differently from one device"):
        check_verifiable(plan)


@pytest.mark.parametrize("backward", [lambda loss: loss.backward(), lambda loss: torch.autograd.backward([loss], None)])
def test_the_second_forward_of_a_checkpoint_casts_as_the_first(backward):
    weight = torch.ones(2, dtype=torch.float64, requires_grad=True)
    dtypes = []

    def scaled(x: Tensor) -> Tensor:
        narrow = x.to(torch.float32)
        dtypes.append(narrow.dtype)
        return weight * narrow * narrow

    with Float64Mode():
        x = torch.full((2,), 3.0, dtype=torch.float64)
        backward(checkpoint(scaled, x, use_reentrant=False).sum())
    assert dtypes == [torch.float64] * 2
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full((2,), 9.0, dtype=torch.float64))


def test_casts_to_float32_give_float64():
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        made = [x.float(), x.to(torch.float32), x.to(dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)]
        assert {tensor.dtype for tensor in (*made, x.softmax(0, dtype=torch.float32))} == {torch.float64}


OFFSETS = torch.tensor([2, 2, 7], dtype=torch.int32)
GROUPED = {
    "rows": ((9, 8), (3, 8, 16), OFFSETS),
    "columns": ((3, 8, 16), (16, 8), torch.tensor([2, 2, 7], dtype=torch.int32)),
    "inner": ((8, 8), (8, 16), torch.tensor([2, 2, 8], dtype=torch.int32)),
    "batches": ((3, 4, 8), (3, 8, 16), None),
}


@pytest.mark.parametrize("kind", GROUPED)
def test_grouped_products_in_float64_equal_those_of_torch_in_float32(kind):
    first, second, offsets = GROUPED[kind]
    torch.manual_seed(0)
    # torch requires strides in multiples of 16 bytes.
    a, b = torch.randn(first), torch.randn(second).transpose(-2, -1).contiguous().transpose(-2, -1)
    expected = F.grouped_mm(a, b, offs=offsets)
    with Float64Mode():
        product = F.grouped_mm(a.double(), b.double(), offs=offsets)
    assert product.dtype == torch.float64
    computed = {"rows": (slice(0, 7),), "columns": (slice(None), slice(0, 7))}.get(kind, ())
    torch.testing.assert_close(product.float()[computed], expected[computed])


def test_a_mixture_of_experts_of_transformers_is_verified():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 50, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "sliding_window": None}

    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **heads))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.inner(tokens).logits.transpose(1, 2)

    tokens = torch.randint(0, 50, (8, 6), generator=torch.Generator().manual_seed(5))
    mixture = dataclasses.replace(
        task(), model=Experts, data=lambda: Data(train=TensorSource(tokens, tokens)), batch_size=4
    )
    verdict = verify(mixture, Plan(microbatches=2))
    assert verdict is not None
    assert verdict.max_deviation <= TOLERANCE


def test_casts_to_complex64_give_complex128():
    x = torch.ones(2, dtype=torch.float64)
    with Float64Mode():
        made = [getattr(x, name)() for name in ("cfloat", "chalf")]
        made += [x.to(torch.complex64), torch.zeros(2, dtype=torch.complex32)]
        assert {tensor.dtype for tensor in made} == {torch.complex128}
