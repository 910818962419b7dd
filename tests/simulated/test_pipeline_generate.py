"""Laws of text that a model of transformers generates while its stages are on several ranks."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fourfold.plan.plan import Plan
from fourfold.step.train_step import TrainStep
from fourfold.testing import threads
from fourfold.words.errors import SettingError, TaskError

pytestmark = pytest.mark.usefixtures("without_dry_run")

transformers = pytest.importorskip("transformers")

CONFIG = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
PROMPT = torch.tensor([[1, 7, 3], [9, 2, 4]])
GREEDY = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(PROMPT)}


@functools.cache
def made() -> Any:
    torch.manual_seed(0)
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG, **heads)).double()


def loss(outputs: Any, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none")


def run(fields: dict[str, Any], body: Any, *, has_batch: bool = True) -> list[Any]:
    """What `body` returns on each rank, after a step that changes no weight."""
    plan, model = Plan(**fields), made()

    def on_rank(comm: Any) -> Any:
        sgd = functools.partial(torch.optim.SGD, lr=0.0)
        step = TrainStep(copy.deepcopy(model), loss, sgd, plan=plan, communicator=comm)
        tokens = torch.arange(32).view(4, 8)
        if has_batch:
            step(({"input_ids": tokens}, tokens))
        return body(step)

    return threads.run(plan.mesh.size, on_rank)


@pytest.mark.parametrize(
    "fields",
    [
        {"pp": 2, "microbatches": 2},
        {"pp": 2, "microbatches": 2, "schedule": "interleaved", "interleave": 2},
        {"pp": 2, "tp": 2, "microbatches": 2},
    ],
)
def test_generate_without_a_cache_gives_the_tokens_of_one_device_on_all_ranks(fields):
    def body(step: TrainStep) -> tuple[Tensor, bool]:
        with step.inference() as model:
            tokens = model.generate(PROMPT, use_cache=False, **GREEDY)
        return tokens, "forward" in vars(step.model)

    expected = made().generate(PROMPT, use_cache=False, **GREEDY)
    assert expected.shape == (2, 8)
    for tokens, is_replaced in run(fields, body):
        assert torch.equal(tokens, expected)
        assert not is_replaced


def test_a_cache_is_refused_and_so_are_other_inputs_on_some_stages():
    def body(step: TrainStep) -> None:
        with step.inference() as model:
            with pytest.raises(SettingError, match=r"past_key_values is a DynamicCache.* try use_cache=False"):
                model.generate(PROMPT, use_cache=True, **GREEDY)
            with pytest.raises(TaskError, match="the same on each of these ranks"):
                model.generate(PROMPT + step.rank, use_cache=False, **GREEDY)

    run({"pp": 2}, body)


def test_a_call_before_the_first_step_says_that_a_dry_run_is_missing():
    def body(step: TrainStep) -> Any:
        with pytest.raises(SettingError, match=r"try step\.dry_run\(batch\)"), step.inference():
            pass
        tokens = torch.arange(32).view(4, 8)
        step.dry_run(({"input_ids": tokens}, tokens))
        with step.inference() as model:
            return model(input_ids=PROMPT).logits

    with torch.no_grad():
        expected = made()(input_ids=PROMPT).logits
    for logits in run({"pp": 2}, body, has_batch=False):
        torch.testing.assert_close(logits, expected, rtol=1e-9, atol=1e-9)
