"""Laws of mixed precision: two-byte working weights, float32 master weights, sums in `reduce_dtype`."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from fourfold.checkpoint.export import export_weights
from fourfold.checkpoint.initial_weights import load_weights
from fourfold.checkpoint.store import CheckpointStore
from fourfold.optim.ema import EMA
from fourfold.optim.master_weights import offload_device
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.trainer.run_logger import format_offload
from tests import cases as cases_module
from tests import pairs
from tests.cases import Case, batches
from tests.checkpoint_runs import ThreadRun
from tests.precision_oracle import (
    CASE,
    ZERO_FIELDS,
    batch_of_rank,
    equal_tensors,
    make_step,
    train_on_threads,
    train_oracle,
    train_steps,
)

pytestmark = pytest.mark.usefixtures("without_dry_run")


@pytest.mark.parametrize("fields", pairs.grid(
    zero=(0, 1, 2, 3), size=(3, 2, 1), microbatches=(2, 1), reduce_dtype=("keep", "fp32")
))  # fmt: skip
def test_rounded_weights_compute_and_master_weights_are_updated_bit_for_bit_as_in_plain_torch(fields):
    size, level_fields = fields["size"], ZERO_FIELDS[fields["zero"]]
    case = dataclasses.replace(
        CASE, **level_fields, microbatches=fields["microbatches"], reduce_dtype=fields["reduce_dtype"]
    )
    expected = train_oracle(case, size)
    for got in train_on_threads(case, size):
        assert got.losses == pytest.approx(expected.losses, rel=1e-6)
        assert {value.dtype for value in got.weights.values()} == {torch.float32}
        assert equal_tensors(got.weights, expected.weights)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize(("optimizer", "model"), [("AdamW", "tied"), ("Adagrad", "mlp"), ("RMSprop", "frozen")])
def test_other_optimizers_and_tied_and_frozen_weights_train_as_in_plain_torch(optimizer, model, zero):
    case = dataclasses.replace(CASE, optimizer=optimizer, model=model, **ZERO_FIELDS[zero], bucket_bytes=4000)
    expected = train_oracle(case, 2).weights
    for got in train_on_threads(case, 2):
        trained = {name: value for name, value in got.weights.items() if value.dtype == torch.float32}
        assert equal_tensors(
            trained, {name: expected[name if name in expected else "second.weight"] for name in trained}
        )
        assert len(trained) == (9 if model != "frozen" else 7)


@pytest.mark.parametrize("fields", pairs.grid(
    zero=(0, 1, 2, 3), microbatches=(2, 1), update=("in_backward", "in_forward")
))  # fmt: skip
def test_updates_in_backward_or_forward_equal_those_after_backward_bit_for_bit(fields):
    case = dataclasses.replace(CASE, **ZERO_FIELDS[fields["zero"]], microbatches=fields["microbatches"], model="tied")
    case = dataclasses.replace(case, batch_sizes=(12, 11, 12, 5))
    after, early = train_on_threads(case, 2), train_on_threads(dataclasses.replace(case, update=fields["update"]), 2)
    assert equal_tensors(early[0].weights, after[0].weights)
    assert equal_tensors(early[1].weights, after[0].weights)


@pytest.mark.parametrize("optimizer", ["LARS", "LAMB"])
@pytest.mark.parametrize("zero", [0, 1])
def test_trust_ratios_use_the_float32_weights(zero, optimizer):
    case = dataclasses.replace(CASE, optimizer=optimizer, **ZERO_FIELDS[zero], reduce_dtype="fp32")
    expected = train_oracle(case, 2)
    for got in train_on_threads(case, 2):
        for name, weight in expected.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_clipping_uses_the_norm_of_the_sums_and_does_not_round_them(zero):
    case = dataclasses.replace(CASE, **ZERO_FIELDS[zero], clip=0.1, batch_sizes=(12, 12))
    expected = train_oracle(case, 2)
    for got in train_on_threads(case, 2):
        assert got.grad_norms == pytest.approx(expected.grad_norms, rel=1e-5)
        for name, weight in expected.weights.items():
            torch.testing.assert_close(got.weights[name], weight, rtol=1e-6, atol=1e-7)


def test_float32_sums_do_not_depend_on_which_rank_has_which_microbatch():
    # The same four rounded gradients, summed in another order.
    def difference(reduce):
        cases = [dataclasses.replace(CASE, microbatches=count, zero=1, reduce_dtype=reduce) for count in (4, 2)]
        one, two = (train_on_threads(case, size)[0].weights for case, size in zip(cases, (1, 2), strict=True))
        return max((one[name] - two[name]).abs().max().item() for name in one)

    assert difference("fp32") < 1e-6 < 1e-5 < difference("keep")


@pytest.mark.parametrize(("reduce", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_gradients_are_summed_in_reduce_dtype_whatever_dtype_the_model_computes_in(reduce, dtype):
    def body(comm):
        case = dataclasses.replace(CASE, precision="keep", reduce_dtype=reduce, zero=1, batch_sizes=(8,))
        step = cases_module.build_step(case, 2, comm)
        train_steps(step, case)
        buffers = step._parts.stage.reducer.grad_buffers
        return {slot.dtype for slot in buffers}, {p.dtype for p in step.model.parameters()}

    assert threads.run(2, body) == [({dtype}, {torch.float64})] * 2


def drifting(plan, comm, steps=100):
    """A weight of 1 that moves by 1e-4 in each step; in bfloat16 the next smaller number is 0.996."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    if plan.precision == "keep":
        model = model.bfloat16()
    make = lambda parameters: torch.optim.SGD(parameters, lr=1e-4)  # noqa: E731
    step = TrainStep(model, lambda outputs, _: outputs.float(), make, plan=plan, communicator=comm, clip=None)
    data = torch.ones(2, 1, dtype=torch.float32 if plan.precision != "keep" else torch.bfloat16), torch.zeros(2)
    for _ in range(steps):
        step(data)
    with step.unsharded() as model:
        working = model.get_parameter("weight").item()
    return working, step.state_dict()["model"]["weight"].item()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_updates_too_small_for_the_working_weights_add_up(zero):
    for working, precise in threads.run(
        2, lambda comm: drifting(Plan(dp=2, **ZERO_FIELDS[zero], precision="bf16"), comm)
    ):
        assert precise == pytest.approx(0.99, rel=1e-5)
        assert working == torch.tensor(precise).bfloat16().item()
    assert threads.run(1, lambda comm: drifting(Plan(), comm)) == [(1.0, 1.0)]


class RecordsDtypes(nn.Module):
    """Records the dtypes of its inputs, parameters and buffer; it has batch normalization."""

    def __init__(self):
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(4))
        self.seen = {}

    def forward(self, x, places):
        self.seen = {"x": x.dtype, "places": places.dtype, "table": self.table.dtype}
        self.seen |= {name: p.dtype for name, p in self.named_parameters()}
        out = self.norm(self.first(x))
        return {"logits": out, "places": places}


def test_the_dtypes_of_inputs_outputs_weights_buffers_and_states():
    def loss(outputs, targets):
        output_dtypes.update({name: value.dtype for name, value in outputs.items()})
        return (outputs["logits"] - targets).square()

    def body(comm):
        make = lambda parameters: torch.optim.Adam(parameters)  # noqa: E731
        plan = Plan(precision="bf16")
        step = TrainStep(RecordsDtypes(), loss, make, plan=plan, communicator=comm, clip=None)
        inputs = {"x": torch.randn(6, 4), "places": torch.arange(6)}
        step((inputs, torch.zeros(6, 4)))
        return step

    output_dtypes = {}
    (step,) = threads.run(1, body)
    low, high = torch.bfloat16, torch.float32
    assert step.model.seen == {
        "x": low,
        "places": torch.int64,
        "table": high,
        "first.weight": low,
        "first.bias": low,
        "norm.weight": high,
        "norm.bias": high,
    }
    assert output_dtypes == {"logits": high, "places": torch.int64}
    state = step.state_dict()
    assert {value.dtype for name, value in state["model"].items() if "num_batches" not in name} == {high}
    assert {value.dtype for keys in state["optimizer"].values() for value in keys.values()
            if isinstance(value, torch.Tensor)} == {high}  # fmt: skip


def resume_training(comm, case, state):
    step = make_step(case, comm.size, comm)
    step.load_state_dict(state)
    assert equal_tensors(step.state_dict()["model"], state["model"])
    return train_steps(step, case, first=2)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize(("zero", "loaded_zero"), [(0, 3), (0, 2), (1, 0), (3, 1)])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit_at_any_zero_level(zero, loaded_zero, precision):
    case = dataclasses.replace(CASE, **ZERO_FIELDS[zero], optimizer="AdamW", precision=precision)
    halfway = dataclasses.replace(case, batch_sizes=case.batch_sizes[:2])

    def first(comm):
        step = make_step(halfway, 2, comm)
        train_steps(step, halfway)
        return step.state_dict()

    states = threads.run(2, first)
    expected = train_on_threads(case, 2)[0].weights
    for got in threads.run(
        2, lambda comm: resume_training(comm, dataclasses.replace(case, **ZERO_FIELDS[loaded_zero]), states[comm.rank])
    ):
        assert equal_tensors(got.weights, expected)
    # On another number of ranks, the loaded state equals the saved one.
    threads.run(3, lambda comm: resume_training(comm, dataclasses.replace(case, **ZERO_FIELDS[loaded_zero]), states[0]))


@pytest.mark.parametrize("zero", [0, 1])
def test_a_float32_state_is_unchanged_by_loading_and_saving_it_in_bf16(zero):
    whole = dataclasses.replace(CASE, precision="keep", **ZERO_FIELDS[zero])

    def first(comm):
        step = make_step(whole, 2, comm)
        train_steps(step, whole)
        return step.state_dict()

    def through(case, states):
        def body(comm):
            step = make_step(dataclasses.replace(case, zero=1 - zero), 2, comm)
            step.load_state_dict(states[comm.rank])
            return step.state_dict()

        return threads.run(2, body)

    states = threads.run(2, first)
    for after in through(whole, through(CASE, states)):
        assert equal_tensors(after["model"], states[0]["model"])
        assert all(equal_tensors(keys, states[0]["optimizer"][name]) for name, keys in after["optimizer"].items())


def is_rounded(step):
    """Whether the working weights are the rounded master weights."""
    state = step.state_dict()["model"]
    with step.unsharded() as model:
        return all(torch.equal(p, state[name].to(p.dtype)) for name, p in model.named_parameters())


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_edits_change_the_float32_weights_and_all_ranks_get_those_of_rank_0(zero):
    def body(comm):
        step = make_step(dataclasses.replace(CASE, **ZERO_FIELDS[zero]), 2, comm)
        before = step.state_dict()["model"]
        with step.edit() as model:
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            model.first.weight.mul_(1.0001 if comm.rank == 0 else 7.0)
        after = step.state_dict()["model"]
        assert torch.equal(after["first.weight"], before["first.weight"] * 1.0001)
        assert all(torch.equal(value, before[name]) for name, value in after.items() if name != "first.weight")
        assert is_rounded(step)
        train_steps(step, CASE)
        return is_rounded(step)

    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize("precision", ["keep", "bf16"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_the_ema_averages_the_float32_weights_and_evaluating_with_it_changes_nothing(zero, precision):
    case = dataclasses.replace(CASE, **ZERO_FIELDS[zero], precision=precision)

    def body(comm):
        step = make_step(case, 2, comm)
        average, expected = EMA(step.weight_shards, 0.5), None
        for number, batch in enumerate(batches(case), 1):
            step(batch_of_rank(step, batch))
            average.update(number)
            weights = step.state_dict()["model"]
            lerp_weight = 1.0 - min(0.5, (1 + number) / (10 + number))
            expected = first | {n: torch.lerp((expected or first)[n], w, lerp_weight) for n, w in weights.items()}
        before = step.state_dict()["model"]
        loss = step.evaluate(batch_of_rank(step, batches(case)[0])).loss
        with step.swapped_weights(average.values):
            assert equal_tensors(step.state_dict()["model"], expected)
            assert is_rounded(step)
            assert step.evaluate(batch_of_rank(step, batches(case)[0])).loss != loss
        assert equal_tensors(step.state_dict()["model"], before)
        assert step.evaluate(batch_of_rank(step, batches(case)[0])).loss == loss
        return is_rounded(step)

    first = {name: p.detach() for name, p in cases_module.model(case.model).float().named_parameters()}
    assert threads.run(2, body) == [True, True]


@pytest.mark.parametrize(("zero", "size", "loaded_on"), [(1, 2, (3, 1)), (0, 2, (2, 3)), (3, 3, (1, 2))])
def test_checkpoints_hold_the_float32_weights_and_the_ema_and_load_on_any_mesh(tmp_path, zero, size, loaded_on):
    case = dataclasses.replace(CASE, **ZERO_FIELDS[zero], batch_sizes=(12, 12, 12))

    def save(comm):
        run: Any = ThreadRun(case, comm, tmp_path, ema=0.9)
        run.run_steps(0, 2, save_at=(2,))
        weights = run.step.state_dict()
        with run.step.swapped_weights(run.ema.values):
            return weights, run.step.state_dict()["model"]

    def load(comm):
        other: Any = ThreadRun(
            dataclasses.replace(case, **ZERO_FIELDS[loaded_on[0]]), comm, tmp_path, token="b", ema=0.9
        )
        assert other.checkpoints.resume().step == 2
        state = other.step.state_dict()
        assert equal_tensors(state["model"], weights["model"])
        assert all(equal_tensors(keys, weights["optimizer"][name]) for name, keys in state["optimizer"].items())
        with other.step.swapped_weights(other.ema.values):
            assert equal_tensors(other.step.state_dict()["model"], averages)

    weights, averages = threads.run(size, save)[0]
    threads.run(loaded_on[1], load)
    export_weights(CheckpointStore(tmp_path).step_dir(2), tmp_path / "weights.safetensors")
    fresh = cases_module.model(case.model)
    load_weights(fresh, tmp_path / "weights.safetensors")
    assert equal_tensors(dict(fresh.state_dict()), weights["model"])


@pytest.mark.parametrize("update", ["after", "in_backward"])
@pytest.mark.parametrize(("zero", "optimizer"), [(0, "AdamW"), (1, "AdamW"), (2, "SGD"), (1, "LAMB")])
def test_offloaded_states_train_as_states_on_the_device_of_the_weights(monkeypatch, zero, optimizer, update):
    if update == "in_backward" and optimizer == "LAMB":
        update = "in_forward"
    case = Case(**ZERO_FIELDS[zero], optimizer=optimizer, update=update, bucket_bytes=1000)
    expected = threads.run(2, lambda comm: cases_module.train_step(case, cases_module.build_step(case, 2, comm)))[0]

    def body(comm):
        step = cases_module.build_step(dataclasses.replace(case, offload="states"), 2, comm)
        own = step._weights.master_weights
        assert set(own.param_names) == set(step._weights.trainable)
        got = cases_module.train_step(case, step)
        state = step.state_dict()
        other = cases_module.build_step(dataclasses.replace(case, zero=0, update="after"), 2, comm)
        other.load_state_dict(state)
        assert equal_tensors(other.state_dict()["model"], state["model"])
        return got, state["model"]

    # As if the ranks were GPUs: CPU ranks have everything in host memory already.
    monkeypatch.setattr(
        "fourfold.step.stage_assembly.offload_device", lambda offload, device: device if offload == "states" else None
    )
    for got, weights in threads.run(2, body):
        assert oracle.deviation(got, expected) <= 1e-12
        assert equal_tensors(weights, got.weights)


def test_on_cpu_ranks_states_are_in_host_memory_already():
    (step,) = threads.run(1, lambda comm: cases_module.build_step(Case(offload="states"), 1, comm))
    assert not step._weights.master_weights.param_names
    assert offload_device("states", torch.device("cuda")) == torch.device("cpu")
    assert "already" in format_offload("cpu")
    assert "where the update runs" in format_offload("cuda")


def test_the_state_of_a_two_byte_model_resumes_in_float32():
    def first(comm):
        case = dataclasses.replace(CASE, precision="keep", optimizer="AdamW")
        make_optimizer, loss = cases_module.optimizer(case), cases_module.loss(case)
        model = cases_module.model(case.model).bfloat16()
        step = TrainStep(model, loss, make_optimizer, plan=case.plan(1), communicator=comm, clip=None)
        inputs, targets = batches(case)[0]
        step((inputs.bfloat16(), targets))
        return step.state_dict()

    def resume(comm):
        case = dataclasses.replace(CASE, optimizer="AdamW")
        step = make_step(case, 1, comm)
        step.load_state_dict(state)
        train_steps(step, case)
        return {value.dtype for keys in step.state_dict()["optimizer"].values() for value in keys.values()
                if isinstance(value, torch.Tensor)}  # fmt: skip

    (state,) = threads.run(1, first)
    assert threads.run(1, resume) == [{torch.float32}]
