"""Laws of resuming from a checkpoint. Ranks are threads."""

import dataclasses
import functools
import json

import pytest
import torch
from torch import Tensor, nn

import fourfold as ff
from fourfold.checkpoint.store import CheckpointStore
from fourfold.feed.source import TensorSource
from fourfold.report.run_record import read_segments
from fourfold.testing import threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import CheckpointError
from tests import cases
from tests.cases import Case, train_oracle
from tests.checkpoint_runs import ThreadRun, rewrite_manifest, save_twice

pytestmark = pytest.mark.usefixtures("without_dry_run")

CASES = [
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12)),
    Case(model="frozen", optimizer="NAdam", batch_sizes=(8, 8, 8, 8), bucket_bytes=900),
    Case(model="mlp", optimizer="SGD", batch_sizes=(8, 8, 8, 8), microbatches=2),
    Case(model="sometimes", unused="allow", batch_sizes=(5, 6, 7, 8)),
    Case(model="sometimes", unused="allow", optimizer="SGD", batch_sizes=(9, 9, 9, 6)),
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), zero=1),
    Case(model="sometimes", unused="allow", batch_sizes=(5, 6, 7, 8), zero=1),
    Case(model="mlp", microbatches=2, batch_sizes=(12, 12, 11, 12), zero=2),
    Case(model="tied", codec="dct", codec_refresh_steps=3, batch_sizes=(12, 12, 11, 12), clip=0.5),
    Case(model="mlp", codec="topk", batch_sizes=(12, 12, 11, 12), zero=1),
    Case(model="mlp", codec="powersgd", microbatches=2, batch_sizes=(12, 12, 11, 12), zero=2),
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), sync="local", local_steps=2, outer_momentum=0.9),
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), update="in_forward"),
    Case(model="sometimes", unused="allow", batch_sizes=(5, 6, 7, 8), zero=1, update="in_forward"),
]


ON_SEVERAL_HOSTS = [
    Case(model="tied", clip=0.5, batch_sizes=(12, 12, 11, 12), zero=3),
    Case(model="frozen", batch_sizes=(12, 12, 12, 12), zero=1, precision="bf16"),
    Case(model="mlp", batch_sizes=(12, 12, 12, 12), zero=3, precision="bf16", microbatches=2),
    Case(model="mlp", codec="topk", batch_sizes=(12, 12, 11, 12), zero=1),
]


@pytest.mark.parametrize(("case", "hosts"), [(case, 1) for case in CASES] + [(case, 3) for case in ON_SEVERAL_HOSTS])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(case, hosts, tmp_path):
    ema = 0.9 if case.update == "after" else None  # an EMA needs the weights after each step

    def uninterrupted(comm):
        run = ThreadRun(case, comm, tmp_path / "whole", ema=ema)
        run.run_steps(0, 4)
        return run.copy_tensors(), torch.get_rng_state()

    def begin(comm):
        ThreadRun(case, comm, tmp_path, ema=ema).run_steps(0, 3, save_at=(2,))

    def resume(comm):
        run = ThreadRun(case, comm, tmp_path, token="b", ema=ema)
        progress = run.checkpoints.resume()
        assert progress is not None
        assert progress.step == 2
        run.run_steps(2, 4)
        return run.copy_tensors()

    whole = threads.run(3, uninterrupted, hosts=hosts)
    threads.run(3, begin, hosts=hosts)
    for (expected, _), got in zip(whole, threads.run(3, resume, hosts=hosts), strict=True):
        assert got.keys() == expected.keys()
        assert all(torch.equal(got[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("size", "zero", "loaded_zero"), [(1, 0, 0), (2, 0, 1), (4, 0, 2), (1, 1, 0), (4, 1, 1), (2, 2, 0)]
)
def test_a_checkpoint_loads_on_another_number_of_ranks_and_another_zero_level(size, zero, loaded_zero, tmp_path):
    case = Case(model="tied", batch_sizes=(12, 12, 12, 12), zero=zero)
    threads.run(3, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(2,)))

    def resume(comm):
        run = ThreadRun(dataclasses.replace(case, zero=loaded_zero), comm, tmp_path)
        assert run.checkpoints.resume() is not None
        run.run_steps(2, 4)
        return {name: p.detach().clone() for name, p in run.step.model.named_parameters()}

    oracle = train_oracle(case)
    for weights in threads.run(size, resume):
        for name, weight in oracle.weights.items():
            torch.testing.assert_close(weights[name], weight, rtol=0, atol=TOLERANCE)


@pytest.mark.covering
@pytest.mark.parametrize("codec", ["int8", "topk", "powersgd", "dct"])
@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 2), (4, 1)])
def test_a_resumed_run_keeps_the_sum_of_residuals_on_another_number_of_ranks(size, zero, codec, tmp_path):
    case = Case(codec=codec, batch_sizes=(12, 11, 12, 12))

    def residuals(run):
        return {name: state["remainder"].clone() for name, state in run.step.codec_state.tensors.items()}

    def begin(comm):
        run = ThreadRun(case, comm, tmp_path)
        run.run_steps(0, 2, save_at=(2,))
        return residuals(run)

    def resume(comm):
        run = ThreadRun(dataclasses.replace(case, zero=zero, bucket_bytes=900), comm, tmp_path)
        assert run.checkpoints.resume() is not None
        found = residuals(run)
        run.run_steps(2, 4)
        return found

    saved, loaded = threads.run(3, begin), threads.run(size, resume)
    assert any(value.any() for value in saved[0].values())
    for name in saved[0]:
        total, now = (torch.stack([each[name] for each in by_rank]).sum(0) for by_rank in (saved, loaded))
        torch.testing.assert_close(now, total, rtol=0, atol=1e-15)


def test_a_codec_without_residuals_refuses_saved_residuals(tmp_path):
    case = Case(codec="topk", batch_sizes=(12, 12))
    threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(2,)))
    with pytest.raises(CheckpointError, match="what a codec has not sent yet, and codec = 'bf16'"):
        threads.run(
            2, lambda comm: ThreadRun(dataclasses.replace(case, codec="bf16"), comm, tmp_path).checkpoints.resume()
        )


def test_a_resumed_run_restores_the_random_state(tmp_path):
    def drawn(comm):
        ThreadRun(Case(), comm, tmp_path).run_steps(0, 2, save_at=(2,))
        first = torch.rand(4)
        resumed_run = ThreadRun(Case(), comm, tmp_path)
        torch.manual_seed(99)
        assert resumed_run.checkpoints.resume() is not None
        return first, torch.rand(4)

    ((first, second),) = threads.run(1, drawn)
    assert torch.equal(first, second)


@pytest.mark.parametrize("state", ["00", "00" * 5056], ids=["another size", "the same size"])
def test_a_random_state_that_torch_rejects_is_refused_before_anything_changes(state, tmp_path):
    save_twice(tmp_path, 1)
    rewrite_manifest(
        CheckpointStore(tmp_path).step_dir(3), lambda manifest: manifest.update(random=[{"cpu": state, "device": ""}])
    )

    def resume(comm):
        run = ThreadRun(Case(), comm, tmp_path)
        before = run.copy_tensors()
        with pytest.raises(CheckpointError, match=f"a random state of {len(state) // 2} bytes"):
            run.checkpoints.resume()
        assert all(torch.equal(value, before[name]) for name, value in run.copy_tensors().items())

    threads.run(1, resume)


def test_a_checkpoint_of_another_model_is_refused_with_every_difference(tmp_path):
    save_twice(tmp_path, 1)
    with pytest.raises(CheckpointError) as caught:
        threads.run(1, lambda comm: ThreadRun(Case(model="frozen"), comm, tmp_path).checkpoints.resume())
    assert "second.weight" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"spare\.bias") as caught:
        threads.run(
            1, lambda comm: ThreadRun(Case(model="unused", unused="allow"), comm, tmp_path).checkpoints.resume()
        )
    assert "spare.weight" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Adam", "AdamW", "AdamW, and states of Adam "),
        ("SGD", "AdamW", "AdamW, and states of SGD "),
        ("AdamW", "AMSGrad", "without max_exp_avg_sq"),
    ],
    ids=["states of the same names", "states of other names", "states that are not there"],
)
@pytest.mark.parametrize("zero", [0, 1])
def test_states_of_another_optimizer_are_refused_before_anything_changes(
    zero, before, after, message, tmp_path, monkeypatch
):
    monkeypatch.setitem(cases.OPTIMIZERS, "AMSGrad", functools.partial(torch.optim.AdamW, amsgrad=True))
    case = Case(optimizer=before, zero=zero)
    threads.run(2, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(2,)))

    def resume(comm):
        run = ThreadRun(dataclasses.replace(case, optimizer=after), comm, tmp_path)
        weights = run.copy_tensors()
        with pytest.raises(CheckpointError, match=message):
            run.checkpoints.resume()
        assert all(torch.equal(value, weights[name]) for name, value in run.copy_tensors().items())

    threads.run(2, resume)


def test_a_checkpoint_is_refused_if_states_are_missing(tmp_path):
    threads.run(1, lambda comm: ThreadRun(Case(optimizer="SGD"), comm, tmp_path).run_steps(0, 2, save_at=(2,)))
    rewrite_manifest(CheckpointStore(tmp_path).step_dir(2), lambda manifest: manifest.update(optimizer="AdamW"))
    with pytest.raises(CheckpointError, match="without exp_avg, exp_avg_sq, step"):
        threads.run(1, lambda comm: ThreadRun(Case(), comm, tmp_path).checkpoints.resume())


def test_a_resumed_run_uses_the_tasks_current_options_and_reports_those_that_changed(tmp_path, monkeypatch):
    monkeypatch.setitem(cases.OPTIMIZERS, "edited", functools.partial(torch.optim.AdamW, eps=1e-3))
    case = Case(batch_sizes=(8, 8, 8, 8))

    def edited_while_it_runs(comm):
        run = ThreadRun(case, comm, tmp_path)
        run.run_steps(0, 2, save_at=(2,))
        for group in run.step.optimizer.param_groups:
            group["eps"] = 1e-3
        run.run_steps(2, 4)
        return run.copy_tensors()

    def edited_before_it_resumes(comm):
        run = ThreadRun(dataclasses.replace(case, optimizer="edited"), comm, tmp_path)
        assert run.checkpoints.resume() is not None
        run.run_steps(2, 4)
        return run.copy_tensors(), run.log.messages

    expected = threads.run(2, edited_while_it_runs)[0]
    for got, messages in threads.run(2, edited_before_it_resumes):
        assert all(torch.equal(got[name], value) for name, value in expected.items())
        assert messages == [
            "the task's optimizer has eps = 0.001 (1e-08 when step 2 was saved): the run continues with it"
        ]


def own_states(run: ThreadRun) -> dict[str, Tensor]:
    """The first moments of Adam on this rank."""
    states = run.step.state_refs()["optimizer"]
    return {name: torch.cat([part.clone() for part in state["exp_avg"]]) for name, state in states.items()}


@pytest.mark.parametrize("size", [2, 3])
def test_local_sgd_states_are_per_rank_and_averaged_on_another_number_of_ranks(size, tmp_path):
    case = Case(sync="local", local_steps=2, outer_momentum=0.9, batch_sizes=(12, 12))

    def begin(comm):
        run = ThreadRun(case, comm, tmp_path)
        run.run_steps(0, 2, save_at=(2,))
        return own_states(run), run.step.state_refs()["outer"]

    def resume(comm):
        run = ThreadRun(case, comm, tmp_path)
        assert run.checkpoints.resume() is not None
        return own_states(run), run.step.state_refs()["outer"]

    saved = threads.run(3, begin)
    for rank, (states, outer) in enumerate(threads.run(size, resume)):
        for name, state in states.items():
            rows = torch.stack([own[name] for own, _ in saved])
            assert not torch.equal(rows[0], rows[1])
            assert torch.equal(state, rows[rank] if size == 3 else rows.mean(0))
            assert torch.equal(outer[name], saved[0][1][name])


def test_a_local_sgd_run_may_resume_with_synchronous_steps(tmp_path):
    case = Case(sync="local", local_steps=2, outer_momentum=0.9, batch_sizes=(12, 12, 12, 12))
    threads.run(3, lambda comm: ThreadRun(case, comm, tmp_path).run_steps(0, 2, save_at=(2,)))

    def resume(comm, **fields):
        run = ThreadRun(dataclasses.replace(case, sync="step", **fields), comm, tmp_path)
        assert run.checkpoints.resume() is not None
        run.run_steps(2, 4)
        return [p.detach().clone() for p in run.step.model.parameters()]

    whole, split = threads.run(2, resume), threads.run(3, lambda comm: resume(comm, zero=2))
    for a, b in zip(whole[0], split[0], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=TOLERANCE)


class EmptyParameters(nn.Module):
    """Two parameters have no elements; with `breaks`, the forward of step 3 fails."""

    def __init__(self, *, breaks: bool) -> None:
        super().__init__()
        self.layer, self.row, self.column = nn.Linear(4, 2), *(nn.Parameter(torch.empty(s)) for s in ((0, 3), (3, 0)))
        self.calls = iter(range(3 if breaks else 99))

    def forward(self, inputs: Tensor) -> Tensor:
        next(self.calls)
        return self.layer(inputs)


def test_a_run_with_ema_and_empty_parameters_resumes(tmp_path):
    data = TensorSource(torch.ones(8, 4), torch.zeros(8, 2))

    def run(*, breaks: bool = False):
        task = ff.Task(
            model=lambda: EmptyParameters(breaks=breaks),
            loss=lambda outputs, targets: (outputs - targets).square(),
            data=lambda: ff.Data(train=data),
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        )
        return ff.train(task, folder=str(tmp_path), name="run", steps=4, batch_size=4, ema=0.5, checkpoint_every=2)

    with pytest.raises(StopIteration):
        run(breaks=True)
    assert run().steps == 4
    log = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(segment.first_step, segment.last_step) for segment in read_segments(log)] == [(1, 2), (3, 4)]
