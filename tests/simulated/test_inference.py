"""Laws of inference: a call of the model on one rank runs a forward-only program, and returns the model's outputs."""

import contextlib

import pytest
import torch
from torch import nn

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import SettingError
from fourfold.words.trace_events import Recorder
from tests.cases import SEED_LOCK, model

pytestmark = pytest.mark.usefixtures("without_dry_run")

X = torch.linspace(-1, 1, 5 * 16, dtype=torch.float64).view(5, 16)


class ProgramRecorder(Recorder):
    """The actions that ran."""

    def __init__(self):
        self.actions = []

    def action(self, action):
        self.actions.append(str(action))
        return contextlib.nullcontext()


class TwoInputs(nn.Module):
    """Has inputs by name, dropout, and an attribute of its own."""

    vocabulary = 7

    def __init__(self):
        super().__init__()
        self.layer, self.dropout = nn.Linear(16, 3, dtype=torch.float64), nn.Dropout(0.5)

    def forward(self, x, scale):
        return self.dropout(self.layer(x)) * scale


def two_inputs():
    with SEED_LOCK:
        torch.manual_seed(0)
        return TwoInputs()


def step_of(module, comm, transport):
    plan = Plan(dp=comm.size, zero=3, transport=transport)
    return TrainStep(module, lambda o, t: (o - t).square(), torch.optim.AdamW, plan=plan, communicator=comm)


@pytest.mark.parametrize("transport", ["gloo", "shared"])
def test_a_call_on_one_rank_runs_forwards_only_and_returns_what_the_model_returns(transport):
    def body(comm):
        step, recorder = step_of(model("mlp"), comm, transport), ProgramRecorder()
        step.set_recorder(recorder)
        with step.inference() as module:
            results = [module(X) for _ in range(3 if comm.rank == 0 else 0)]
        assert not any(result.requires_grad for result in results)
        return results, recorder.actions

    (results, actions), *others = threads.run(3, body)
    assert actions == ["F0.0"] * 3
    assert all(other == ([], []) for other in others)
    for result in results:
        torch.testing.assert_close(result, model("mlp")(X).detach(), rtol=0, atol=0)


def test_inputs_may_have_names_and_attributes_are_the_models():
    def body(comm):
        step = step_of(two_inputs(), comm, "gloo")
        with step.inference() as module:
            assert (module.vocabulary, module.training) == (7, False)
            result = module(x=X, scale=2.0)
            for inputs, named in [((), {}), ((X, 2.0), {}), ((X,), {"scale": 2.0})]:
                with pytest.raises(SettingError, match="one input, or a dict of inputs"):
                    module(*inputs, **named)
        assert step.model.training
        return result

    expected = two_inputs().eval()(X, 2.0).detach()
    for result in threads.run(2, body):
        assert torch.equal(result, expected)
