"""A model whose weights name their dims trains as one device does, whichever dims the plan splits."""

import pytest

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.words.errors import PlanError
from tests.simulated.test_tensor_axis import ADAM, TOLERANCE, deviation, language_model, one_device, tokens, train


@pytest.mark.parametrize("dims", ["mlp:tp", "heads:tp batch:dp", "vocab:tp length:sp"])
def test_every_choice_of_dims_trains_as_one_device(dims):
    plan = Plan(dp=2, tp=2, dims=dims)

    def body(comm):
        step = TrainStep(
            language_model(), lm.loss, ADAM, plan=plan, communicator=comm, clip=0.5, tensor=lm.TENSOR_RULES
        )
        layers = {
            name.rpartition(".")[0].rpartition(".")[2] for name, s in step.tensor_shards.items() if not s.is_whole
        }
        return deviation(step, *train(step, tokens(8)), one_device()), layers

    deviations, layers = zip(*threads.run(4, body), strict=True)
    assert max(deviations) <= TOLERANCE
    of_dim = {"mlp": {"gate_up", "down"}, "heads": {"qkv", "out"}, "vocab": {"embedding", "head"}}
    assert all(each == of_dim[dims.partition(":")[0]] for each in layers)


def test_a_dim_that_the_model_does_not_have_is_rejected_on_one_rank_too():
    def body(comm):
        plan = Plan(dims="hidden:tp")
        TrainStep(language_model(), lm.loss, ADAM, plan=plan, communicator=comm, tensor=lm.TENSOR_RULES)

    with pytest.raises(PlanError, match=r'dims has "hidden:tp" .* a dim that the rules name: vocab, model, heads, mlp'):
        threads.run(1, body)
