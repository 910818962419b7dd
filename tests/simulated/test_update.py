"""Laws of when buckets are updated."""

import dataclasses

import pytest
import torch

from fourfold.run.build import parallelize
from fourfold.testing import threads
from fourfold.words.action import Verb
from fourfold.words.errors import PlanError
from tests import training
from tests.training import Case, batches, build, local, train_step

CASE = Case(batch_sizes=(8, 8, 8, 8), bucket_bytes=1000, optimizer="AdamW")


@pytest.mark.parametrize("zero", [0, 1, 2])
@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_updates_in_backward_give_the_weights_of_updates_after_it_bit_for_bit(size, microbatches, zero):
    case = dataclasses.replace(CASE, zero=zero, microbatches=microbatches, model="tied", batch_sizes=(12, 11, 12, 5))
    early = dataclasses.replace(case, update="in_backward")
    expected = threads.run(size, lambda ranks: train_step(case, build(case, size, ranks)))
    for got, wanted in zip(
        threads.run(size, lambda r: train_step(early, build(early, size, r))), expected, strict=True
    ):
        assert got.losses == wanted.losses
        assert all(torch.equal(got.weights[name], weight) for name, weight in wanted.weights.items())


@pytest.mark.parametrize(("size", "zero"), [(1, 0), (2, 1), (2, 2)])
def test_the_first_buckets_are_updated_while_backward_goes_on(size, zero):
    case = dataclasses.replace(CASE, zero=zero, update="in_backward")

    def body(ranks):
        step, late = build(case, size, ranks), []
        update = step._actions.update

        def watched(bucket):
            late.append(bool(step._gradients.num_launched == len(step.buckets)))
            update(bucket)

        step._actions.update = watched
        step(local(batches(case)[0], size, ranks.rank))
        return late

    # Of a bucket's two ranks at least the one that launches it last finds all there is to be had.
    assert any(not late for updates in threads.run(size, body) for late in updates)


def test_one_rank_frees_each_gradient_once_it_is_used():
    def slots(update):
        step = threads.run(1, lambda ranks: build(dataclasses.replace(CASE, update=update), 1, ranks))[0]
        return len({slot.data_ptr() for slot in step._transport.slots}), len(step.buckets)

    held, num_buckets = slots("in_backward")
    assert held == 4 < num_buckets
    assert slots("after") == (num_buckets, num_buckets)


def test_the_program_shows_updates_behind_their_reductions():
    step = threads.run(1, lambda ranks: build(dataclasses.replace(CASE, update="in_backward"), 1, ranks))[0]
    verbs = [a.verb for a in step.program if a.verb in (Verb.REDUCE, Verb.UPDATE)]
    assert verbs == [Verb.REDUCE, Verb.UPDATE] * len(step.buckets)


@pytest.mark.parametrize(("fields", "said"), [
    ({"clip": 1.0}, "the norm of all gradients before"),
    ({"unused": "allow"}, "which parameters got no gradient"),
])  # fmt: skip
def test_updates_in_backward_are_refused_where_they_cannot_know_enough(fields, said):
    case = dataclasses.replace(CASE, update="in_backward", **fields)
    model, loss, optimizer = training.model(case.model), training.loss(case), training.optimizer(case)
    with pytest.raises(PlanError, match=said):
        parallelize(model, loss, optimizer, case.plan(1), clip=case.clip)
