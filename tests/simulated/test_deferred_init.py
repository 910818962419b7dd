"""Deferred initialization: weights that are computed one at a time are those of a model that is made at once."""

import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable

import pytest
import torch
import transformers
from torch import nn

import fourfold as ff
from fourfold.axes.tensor.work.layers import local_part
from fourfold.plan.plan import Plan
from fourfold.step.initial_model import make_initial_model
from fourfold.step.train_step import TrainStep
from fourfold.tasks import lm
from fourfold.testing import threads
from fourfold.torch_kit import deferred_init
from fourfold.torch_kit.deferred_init import deferred_model
from fourfold.words.errors import SettingError
from tests.cases import SEED_LOCK

CPU = torch.device("cpu")
SIZE = 64


@pytest.fixture(autouse=True)
def _small_handles(monkeypatch):
    """Models of tests are small: nearly all of their weights are deferred here."""
    monkeypatch.setattr(deferred_init, "MIN_ELEMENTS", 256)


class EveryWay(nn.Module):
    """Weights made in ways that need more than one draw, in an order that is not that of the parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.other = (nn.Linear(SIZE, SIZE) for _ in range(3))
        self.tokens = nn.Embedding(100, SIZE, padding_idx=3)
        self.head = nn.Linear(SIZE, 100, bias=False)
        self.head.weight = self.tokens.weight
        self.scale = nn.Parameter(torch.full((SIZE, SIZE), 0.5, dtype=torch.float64), requires_grad=False)
        self.register_buffer("mask", torch.ones(SIZE, SIZE).tril())
        self.table = torch.rand(SIZE, SIZE)
        torch.rand(3)  # drawn between weights, and not deferred
        nn.init.trunc_normal_(self.one.weight)  # draws until its values are within bounds
        nn.init.orthogonal_(self.two.weight)
        self.apply(self._init)
        with torch.no_grad():
            self.two.weight.mul_(2)
            self.two.weight.copy_(self.two.weight)
            self.one.weight.copy_(self.two.weight.t() + self.one.weight)
            self.one.weight.add_(self.tokens.weight[:SIZE])
            self.tokens.weight[7:9].fill_(2.0)
            self.tokens.weight.data[10] = self.one.bias
            self.one.weight.data.normal_(generator=torch.Generator().manual_seed(5)).add_(self.one.weight.mean())
            self.other.weight.data = self.other.weight.data.double().exp()
            if self.two.weight.sum() > 1e9:
                self.two.weight.zero_()

    def _init(self, module: nn.Module) -> None:
        if isinstance(module, nn.Embedding):
            module.weight.data.normal_(0, 0.02)


def encoder() -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64), 2, enable_nested_tensor=False)  # deep copies


def of_transformers(model: type, config: type, **options: object) -> Callable[[], nn.Module]:
    sizes = {"vocab_size": 57, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"intermediate_size": 48, "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None}
    return lambda: model(config(**sizes, **options))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "every way": EveryWay,
    "lm": lambda: lm.LanguageModel(width=32, layers=2, heads=4, kv_heads=2),
    "in another dtype": lambda: lm.LanguageModel(width=32, layers=1, heads=4, kv_heads=2).to(torch.bfloat16),
    "encoder": encoder,
    "llama": of_transformers(transformers.LlamaForCausalLM, transformers.LlamaConfig, num_key_value_heads=2),
    "gpt2": of_transformers(transformers.GPT2LMHeadModel, transformers.GPT2Config, n_positions=16),
    "bert": of_transformers(transformers.BertForMaskedLM, transformers.BertConfig),
}


@pytest.mark.parametrize("name", MODELS)
def test_weights_computed_one_at_a_time_are_those_made_at_once(name):
    with SEED_LOCK:
        torch.manual_seed(3)
        expected, state = MODELS[name](), torch.get_rng_state()
        torch.manual_seed(3)
        model, weights = deferred_model(MODELS[name], CPU)
        assert torch.equal(torch.get_rng_state(), state)
    assert type(model) is type(expected)
    pairs = list(zip(expected.named_parameters(), model.named_parameters(), strict=True))
    held = sum(p.untyped_storage().nbytes() for _, (_, p) in pairs)
    assert held < sum(p.nbytes for (_, p), _ in pairs) / 4
    for (_, wanted), (parameter_name, parameter) in reversed(pairs):  # in any order
        assert type(parameter) is nn.Parameter
        assert parameter.requires_grad == wanted.requires_grad
        assert torch.equal(weights.whole(parameter), wanted), parameter_name
    for (buffer_name, wanted), (_, buffer) in zip(expected.named_buffers(), model.named_buffers(), strict=True):
        assert type(buffer) is torch.Tensor, buffer_name
        assert torch.equal(buffer, wanted), buffer_name
    if isinstance(model, EveryWay):
        assert model.head.weight is model.tokens.weight
        assert isinstance(expected, EveryWay)
        assert type(model.table) is torch.Tensor
        assert torch.equal(model.table, expected.table)


def to_numpy() -> nn.Module:
    model = nn.Linear(SIZE, SIZE)
    model.weight.detach().numpy()[:] = 1.0
    return model


def shared_memory() -> nn.Module:
    first, second = nn.Linear(SIZE, SIZE), nn.Linear(SIZE, SIZE)
    second.weight = nn.Parameter(first.weight.detach())
    return nn.ModuleList([first, second])


def resized() -> nn.Module:
    model = nn.Linear(SIZE, SIZE)
    model.weight.detach().resize_(SIZE, SIZE)
    return model


def other_data() -> nn.Module:
    model = nn.Linear(SIZE, SIZE)
    model.weight.data = torch.eye(SIZE)
    return model


@pytest.mark.parametrize("make", [to_numpy, shared_memory, resized, other_data])
def test_a_model_that_cannot_be_deferred_is_made_at_once_and_the_log_says_so(make, caplog):
    with SEED_LOCK, caplog.at_level(logging.WARNING, logger="fourfold"):
        torch.manual_seed(3)
        expected, state = make(), torch.get_rng_state()
        torch.manual_seed(3)
        model, weights = make_initial_model(make, CPU, defers=True, is_log_rank=True)
        assert torch.equal(torch.get_rng_state(), state)
    assert not weights.are_deferred
    for wanted, parameter in zip(expected.parameters(), model.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        assert weights.whole(parameter) is not None
    assert "each rank makes the whole model before it is split" in caplog.text


def test_an_error_of_the_function_itself_is_raised():
    def wrong() -> nn.Module:
        raise ZeroDivisionError("its own")

    with pytest.raises(ZeroDivisionError, match="its own"):
        make_initial_model(wrong, CPU, defers=True, is_log_rank=True)


def test_a_cut_model_has_the_shards_of_the_whole_one(without_dry_run):
    make = MODELS["lm"]
    with SEED_LOCK:
        torch.manual_seed(3)
        whole = make().state_dict()

    def body(comm):
        with SEED_LOCK:
            torch.manual_seed(3)
            model, weights = make_initial_model(make, CPU, defers=True, is_log_rank=False)
        assert weights.are_deferred
        optimizer = lambda parameters: torch.optim.AdamW(parameters, lr=1e-2)  # noqa: E731
        step = TrainStep(
            model, lm.loss, optimizer,
            plan=Plan(dp=2, tp=2, zero=1), communicator=comm, tensor=lm.TENSOR_RULES,
            initial_weights=weights, same_batches="allow",
        )  # fmt: skip
        shards = step.tensor_shards
        assert all(torch.equal(p, local_part(whole[name], shards[name])) for name, p in model.named_parameters())
        tokens = torch.arange(24).view(2, 12) % 57
        inputs = {"tokens": tokens, "positions": torch.arange(12).expand(2, 12)}
        return [step((inputs, tokens)).loss for _ in range(2)]

    losses = threads.run(4, body)
    assert losses[0][1] < losses[0][0]
    assert all(each == losses[0] for each in losses)


@pytest.mark.parametrize(("model", "optimizer", "message"), [
    (lambda: 3, torch.optim.SGD, "model() = 3"),
    (lambda: nn.Linear(2, 2, device="meta"), torch.optim.SGD, "2 parameters on the meta device"),
    (lambda: nn.Linear(2, 2), torch.optim.SGD([nn.Parameter(torch.ones(1))]), "parameters that exist already"),
])  # fmt: skip
def test_wrong_functions_raise_setting_errors(model, optimizer, message, monkeypatch):
    with pytest.raises(SettingError) as error:
        ff.parallelize(model, nn.functional.mse_loss, optimizer, ff.Plan())
    assert message in str(error.value)


def test_no_more_than_shards_and_one_whole_weight_are_held():
    """In a process of its own, whose peak of resident memory is that of the cut."""
    code = """
        import torch
        from torch import nn
        from fourfold.torch_kit.deferred_init import deferred_model
        from fourfold.axes.tensor.work.layers import local_part
        from fourfold.plan.param_spec import TensorShard

        def peak():
            lines = open("/proc/self/status").read().splitlines()
            return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) * 1024

        def make():  # 16 weights of 16 MiB, each drawn twice
            model = nn.Sequential(*(nn.Linear(2048, 2048, bias=False) for _ in range(16)))
            return model.apply(lambda m: isinstance(m, nn.Linear) and nn.init.normal_(m.weight))

        deferred_model(lambda: nn.Linear(300, 300), torch.device("cpu"))  # imports
        before = peak()
        model, weights = deferred_model(make, torch.device("cpu"))
        for parameter in model.parameters():
            whole = weights.whole(parameter)
            parameter.data = local_part(whole, TensorShard.even(whole.shape, 0, 1, 8))
            del whole
        print((peak() - before) / 2**24)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, check=True
    )
    shards = 16 / 8
    assert shards <= float(done.stdout) <= shards + 2.25, done.stdout
