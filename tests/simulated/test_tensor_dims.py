"""A model whose weights name their dims trains as one device does, whichever dims the plan splits."""

import pytest
import torch

from fourfold.axes.tensor.attach.axis import place_shards
from fourfold.model.weights import num_parameters
from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import oracle, threads
from fourfold.words.errors import PlanError
from tests.cases import SEED_LOCK
from tests.simulated.test_tensor_axis import ADAM, TOLERANCE, deviation, language_model, one_device, tokens, train

pytestmark = pytest.mark.usefixtures("without_dry_run")


@pytest.mark.parametrize("dims", ["mlp:tp", "heads:tp batch:dp", "vocab:tp length:cp"])
def test_every_choice_of_dims_trains_as_one_device(dims):
    plan = Plan(dp=2, tp=2, dims=dims)

    def body(comm):
        step = TrainStep(
            language_model(), lm.loss, ADAM, plan=plan, communicator=comm, clip=0.5, tensor=lm.TENSOR_RULES
        )
        layers = {
            name.rpartition(".")[0].rpartition(".")[2] for name, s in step.tensor_shards.items() if not s.is_whole
        }
        assert num_parameters(step.model, step.tensor_shards) == sum(p.numel() for p in language_model().parameters())
        return deviation(step, *train(step, tokens(8)), one_device()), layers

    deviations, layers = zip(*threads.run(4, body), strict=True)
    assert max(deviations) <= TOLERANCE
    of_dim = {"mlp": {"gate_up", "down"}, "heads": {"qkv", "out"}, "vocab": {"embedding", "head"}}
    assert all(each == of_dim[dims.partition(":")[0]] for each in layers)


def test_heads_are_divided_among_tensor_ranks_and_again_by_ulysses():
    def model():
        with SEED_LOCK:
            torch.manual_seed(7)
            return lm.LanguageModel(width=32, layers=1, heads=8, kv_heads=4).double()

    def body(comm):
        plan = Plan(cp=2, tp=2, ulysses=2)
        step = TrainStep(model(), lm.loss, ADAM, plan=plan, communicator=comm, clip=0.5, tensor=lm.TENSOR_RULES)
        return [step(batch).loss for batch in tokens(8)]

    expected = oracle.train(model(), lm.loss, ADAM, tokens(8), clip=0.5)
    for losses in threads.run(4, body):
        assert losses == pytest.approx(expected.losses, rel=TOLERANCE)
    got = r"ulysses = 2, tp = 4, and a tensor rank has 2 heads, 1 kv_heads .*try ulysses = 1"
    with pytest.raises(PlanError, match=got):
        place_shards(model(), lm.TENSOR_RULES, Plan(cp=2, tp=4, ulysses=2).tensor_spec)


def test_a_dim_that_the_model_does_not_have_is_rejected_on_one_rank_too():
    def body(comm):
        plan = Plan(dims="hidden:tp")
        TrainStep(language_model(), lm.loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)

    with pytest.raises(PlanError, match=r'dims has "hidden:tp" .* a dim that the rules name: vocab, model, heads, mlp'):
        threads.run(1, body)
