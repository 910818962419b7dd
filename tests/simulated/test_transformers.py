"""transformers models over the context axis train as in one process, unchanged. Nothing is downloaded."""

import copy
import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.axes.context.attach.check import ContextDryRun
from fourfold.axes.context.attach.token_shards import token_shards
from fourfold.axes.context.rules.layout import ContextSpec
from fourfold.model.transformers_attention import ATTENTION_NAME
from fourfold.plan.plan import Plan
from fourfold.proof.checks import STRICTEST_SEQUENCE_CHECK
from fourfold.step.train_step import TrainStep
from fourfold.testing import oracle, threads
from fourfold.testing.oracle import TOLERANCE
from fourfold.words.errors import TaskError

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 50, "attn_implementation": "sdpa"}
LENGTH = 16


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, **SMALL
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> nn.Module:
    options = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**options, **dropouts, **SMALL))


def bert() -> nn.Module:
    options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    dropouts = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    return transformers.BertForMaskedLM(transformers.BertConfig(**options, **dropouts, **SMALL))


def without_cache() -> nn.Module:
    """Without a cache, transformers takes gaps in a rank's positions for borders of packed documents."""
    model = llama()
    setattr(model.config, "use_cache", False)  # noqa: B010
    return model


MODELS = {"llama": llama, "uncached": without_cache, "gpt2": gpt2, "bert": bert}


class KeepFloat64(torch.overrides.TorchFunctionMode):
    """Replaces casts to float32, as in these models' norms: they would round values that are compared to 1e-9."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*args, **kwargs)


@functools.cache
def made(kind: str) -> nn.Module:
    torch.manual_seed(3)
    return MODELS[kind]().double()


def batches(*, masked: bool = False, length: int = LENGTH) -> list:
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(3):
        tokens, targets = torch.randint(0, 50, (2, 4, length), generator=generator)
        inputs = {"input_ids": tokens, "position_ids": torch.arange(length).expand(4, length)}
        if masked:
            inputs["attention_mask"] = (torch.arange(length) < torch.tensor([[length], [9], [3], [12]])).long()
        result.append((inputs, targets))
    return result


def loss(outputs, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs.logits.flatten(0, 1), targets.flatten(), reduction="none")


adamw = functools.partial(torch.optim.AdamW, lr=1e-2)


def train(comm, kind: str, plan: Plan, given: list) -> oracle.TrainingResult:
    with KeepFloat64():
        step = TrainStep(copy.deepcopy(made(kind)), loss, adamw, plan=plan, communicator=comm, clip=None)
        metrics = [step(batch) for batch in given]
    return oracle.snapshot(step, [m.loss for m in metrics], [])


def expected(kind: str, given: list) -> oracle.TrainingResult:
    with KeepFloat64():
        return oracle.train(copy.deepcopy(made(kind)), loss, adamw, given)


@pytest.mark.covering
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_transformers_model_is_trained_as_in_one_process(kind, cp, masked):
    given = batches(masked=masked)
    single_process = expected(kind, given)
    trained = threads.run(cp, lambda comm: train(comm, kind, Plan(cp=cp), given))
    assert max(oracle.deviation(each, single_process) for each in trained) <= TOLERANCE


@pytest.mark.parametrize("kind", MODELS)
def test_lengths_that_do_not_divide_are_padded(kind):
    given = batches(masked=True, length=13)
    single_process = expected(kind, given)
    trained = threads.run(2, lambda comm: train(comm, kind, Plan(cp=2, ring="plain"), given))
    assert max(oracle.deviation(each, single_process) for each in trained) <= TOLERANCE


def test_outside_a_step_a_model_keeps_its_configured_attention():
    def body(comm):
        step = TrainStep(copy.deepcopy(made("llama")), loss, adamw, plan=Plan(cp=2), communicator=comm, clip=None)
        step(batches()[0])
        return getattr(step.model.config, "_attn_implementation")  # noqa: B009

    assert threads.run(2, body) == ["sdpa", "sdpa"]


@pytest.mark.parametrize("kind", ["llama", "uncached"])
@pytest.mark.parametrize("first", [0, 1])
def test_packed_documents_are_refused(kind, first):
    given = batches()[: first + 1]
    given[first][0].update(position_ids=torch.arange(LENGTH).remainder(5).expand(4, LENGTH), attention_mask=None)
    with pytest.raises(TaskError, match=r"(?s)in the batch.*packed documents"):
        threads.run(2, lambda comm: train(comm, kind, Plan(cp=2), given))


def test_sliding_windows_are_refused():
    def body(comm):
        config = transformers.MistralConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            sliding_window=4,
            **SMALL,
        )
        model = transformers.MistralForCausalLM(config)
        TrainStep(model, loss, adamw, plan=Plan(cp=2), communicator=comm, clip=None)(batches()[0])

    with pytest.raises(TaskError, match=r"a mask by sliding_window_causal_mask_function|a mask by and_masks"):
        threads.run(2, body)


def test_linear_attention_is_refused_with_the_module():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4}
    linear = {f"linear_{name}_head_dim": 8 for name in ("key", "value")}
    heads = {"num_key_value_heads": 2, "head_dim": 8, "linear_num_value_heads": 4, "linear_num_key_heads": 2, **linear}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = transformers.Qwen3NextConfig(**sizes, **heads, **experts, shared_expert_intermediate_size=24, **SMALL)

    def body(comm):
        model = transformers.Qwen3NextForCausalLM(config)
        TrainStep(model, loss, adamw, plan=Plan(cp=2), communicator=comm, clip=None)(batches()[0])

    with pytest.raises(TaskError, match=r"depend on other ranks' tokens, first in model\.layers\.0\.linear_attn"):
        threads.run(2, body)


def test_a_model_without_attention_interface_is_refused():
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = transformers.FalconForCausalLM(transformers.FalconConfig(**sizes, **SMALL))
    (problem,) = ContextDryRun(model, batches()[0][0], token_shards(ContextSpec(2), LENGTH)[0]).run().problems
    assert "a FalconForCausalLM that fails with another attention function" in problem.got


def test_a_mixture_of_experts_passes_the_dry_run_in_float64():
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    options = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}
    torch.manual_seed(3)
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, **options, **SMALL))
    for index in range(2):
        result = ContextDryRun(model, batches()[0][0], token_shards(ContextSpec(2), LENGTH)[index]).run()
        assert (result.problems, result.config) == ([], STRICTEST_SEQUENCE_CHECK)


def test_a_model_that_computes_its_own_positions_is_refused():
    class Blind(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = copy.deepcopy(made("gpt2"))

        def forward(self, input_ids: Tensor, position_ids: Tensor):
            return self.inner(input_ids)

    def body(comm):
        TrainStep(Blind(), loss, adamw, plan=Plan(cp=2), communicator=comm, clip=None)(batches()[0])

    with pytest.raises(TaskError, match=r"does not use position_ids"):
        threads.run(2, body)


def test_the_attention_name_is_registered_after_use():
    threads.run(2, lambda comm: train(comm, "llama", Plan(cp=2), batches()[:1]))
    assert ATTENTION_NAME in transformers.AttentionInterface()
