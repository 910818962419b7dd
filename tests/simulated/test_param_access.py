"""Laws of parameter access tracking: every use of a parameter is reported before it happens."""

import copy
import gc
import io
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from fourfold.torch_kit.param_access import ParamAccess, outside_transforms

WEIGHTS = [nn.Parameter(torch.randn(3, 3, dtype=torch.float64)) for _ in range(3)]


class Sink:
    """Calls a function with the bucket of each report."""

    def __init__(self, function):
        self._function = function

    def before_access(self, bucket):
        self._function(bucket)


class Tracked:
    """Three matrices, the first two in bucket 0, and the buckets whose uses were reported."""

    def __init__(self):
        self.first, self.second, self.third = (nn.Parameter(w.detach().clone()) for w in WEIGHTS)
        self.buckets = []
        self.uses = ParamAccess([[self.first, self.second], [self.third]])
        self.uses.sink = Sink(self.buckets.append)


@pytest.fixture
def tracked():
    made = Tracked()
    yield made
    made.uses.close()


X = torch.ones(2, 3, dtype=torch.float64)


@pytest.mark.parametrize(("use", "buckets"), [
    (lambda t: F.linear(X, t.first), [0]),
    (lambda t: t.first + t.second, [0]),
    (lambda t: X @ t.third, [1]),
    (lambda t: torch.stack([t.first, t.third]), [0, 1]),
    (lambda t: torch.cat((t.third, X)), [1]),
    (lambda t: 1.0 - t.first, [0]),
    (lambda t: torch.add(X[:1], other=t.third), [1]),
    (lambda t: t.first.data, [0]),
    (lambda t: t.first.T, [0]),
    (lambda t: t.first[0], [0]),
    (lambda t: t.first.view(9), [0]),
    (lambda t: t.first.detach(), [0]),
    (lambda t: t.third.data_ptr(), [1]),
    (lambda t: t.third.tolist(), [1]),
    (lambda t: t.third.requires_grad_(False).mul_(1.0), [1]),
    (lambda t: t.first.grad_fn or t.first.untyped_storage(), [0]),
    (lambda t: torch.ops.aten.mm(X, t.third), [1]),
    (lambda t: torch.func.vmap(lambda x: x @ t.third)(X), [1]),
    (lambda t: torch.func.grad(lambda x: (x @ t.third).sum())(X), [1]),
    (lambda t: copy.deepcopy(t.third), [1]),
    (lambda t: repr(t.third), [1]),
])  # fmt: skip
def test_every_kind_of_use_is_reported_once_per_operation(tracked, use, buckets):
    use(tracked)
    assert tracked.buckets == buckets


def test_a_use_is_reported_before_it_happens(tracked):
    tracked.uses.sink = Sink(lambda bucket: tracked.third.data.fill_(2.0))
    assert torch.equal(X @ tracked.third, torch.full((2, 3), 6.0, dtype=torch.float64))


def in_autocast(x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return x.sum()


@pytest.mark.parametrize("use", [
    lambda t: torch.func.grad(lambda x: (x @ t.third).sum())(X.float()),
    lambda t: torch.func.vmap(lambda x: x @ t.third)(X.float()),
    lambda t: in_autocast(t.third),
])  # fmt: skip
def test_the_sink_can_change_parameters_inside_transforms_and_autocast(tracked, use):
    def square(bucket):
        with outside_transforms("cpu"):
            tracked.third.copy_(torch.mm(tracked.third, tracked.third))

    start = WEIGHTS[2].detach().float()
    tracked.third.data, tracked.uses.sink = start.clone(), Sink(square)
    use(tracked)
    tracked.uses.close()
    assert torch.equal(tracked.third, torch.mm(start, start))


@pytest.mark.parametrize("inspect", [
    lambda t: (t.first.shape, t.first.dtype, t.first.device, t.first.ndim, t.first.layout, t.first.is_cuda),
    lambda t: (t.first.grad, t.first.requires_grad, t.first.is_leaf, t.first.grad_fn, t.first._version),
    lambda t: (t.first.size(), t.first.size(0), t.first.dim(), t.first.numel(), t.first.stride(), len(t.first)),
    lambda t: (t.first.is_floating_point(), torch.is_complex(t.first), t.first.element_size(), hash(t.first)),
    lambda t: t.first.register_post_accumulate_grad_hook(lambda p: None),
    lambda t: t.first.requires_grad_(True),
    lambda t: setattr(t.first, "grad", None),
    lambda t: setattr(t.first, "data", torch.zeros(3, 3, dtype=torch.float64)),
    lambda t: isinstance(t.first, nn.Parameter),
    lambda t: nn.ParameterList([t.first, t.third]),
])  # fmt: skip
def test_reading_metadata_is_no_use(tracked, inspect):
    inspect(tracked)
    assert tracked.buckets == []


def test_nothing_is_reported_without_a_sink_or_after_close(tracked):
    sink, tracked.uses.sink = tracked.uses.sink, None
    F.linear(X, tracked.first)
    tracked.uses.sink = sink
    tracked.uses.close()
    F.linear(X, tracked.first)
    assert tracked.buckets == []
    assert type(tracked.first) is nn.Parameter


def test_uses_by_the_sink_are_not_reported(tracked):
    tracked.uses.sink = Sink(lambda bucket: (tracked.buckets.append(bucket), tracked.third.sum()))
    F.linear(X, tracked.first)
    assert tracked.buckets == [0]


class Block(nn.Module):
    """Weights used inside and outside of their modules, tied, recomputed, and computed by a parametrization."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.plain = nn.Linear(4, 4)
        self.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.kept = nn.Linear(4, 4)
        self.head = nn.Linear(4, 7)
        self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x, _ = self.lstm(x)
        x = checkpoint(self.plain, x, use_reentrant=False)
        x = checkpoint(self.kept, self.normed(x), use_reentrant=True)
        return F.linear(x, self.embedding.weight, self.head.bias)


def block():
    torch.manual_seed(3)
    return Block().double()


TOKENS = torch.arange(10).view(2, 5) % 7


def gradients(model):
    model(TOKENS).square().mean().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def test_a_model_computes_the_same_and_the_use_of_every_parameter_is_reported():
    expected, model, seen = gradients(block()), block(), []
    parameters = list(model.parameters())
    uses = ParamAccess([[p] for p in parameters])
    uses.sink = Sink(seen.append)
    results = []
    model.register_forward_hook(lambda m, a, out: results.append(out), always_call=True)
    got = gradients(model)
    assert got.keys() == expected.keys() == dict(model.named_parameters()).keys()
    assert set(seen) == set(range(len(parameters)))
    assert all(torch.equal(got[name], g) and type(got[name]) is torch.Tensor for name, g in expected.items())
    assert type(results[0]) is torch.Tensor
    # Both kinds of checkpoint recompute in backward, and these uses are reported too.
    again = [i for i, (name, _) in enumerate(model.named_parameters()) if name.split(".")[0] in ("plain", "kept")]
    assert all(seen.count(index) == 2 for index in again)
    functional, _ = torch.func.functional_call(model, dict(model.named_parameters()), TOKENS), seen.clear()
    assert torch.equal(functional, block()(TOKENS))


def test_copies_and_saved_files_of_a_model_have_plain_parameters():
    model = block()
    uses = ParamAccess([list(model.parameters())])
    uses.sink = Sink(lambda bucket: None)
    for other in (copy.deepcopy(model), _reread(model)):
        assert all(type(p) is nn.Parameter for p in other.parameters())
        assert other.head.weight is other.embedding.weight
        assert all(torch.equal(a, b) for a, b in zip(other.parameters(), model.parameters(), strict=True))
    assert all(type(value) is torch.Tensor for value in model.state_dict().values())
    assert repr(model.plain.bias) == repr(block().plain.bias)


def _reread(model):
    file = io.BytesIO()
    torch.save(dict(model.named_parameters()), file)
    file.seek(0)
    other = block()
    for name, parameter in torch.load(file, weights_only=True).items():
        assert type(parameter) is nn.Parameter
        other.get_parameter(name).data = parameter.data
    return other


class Marked(torch.Tensor):
    """A user's tensor subclass, which torch propagates to results."""


def test_a_users_tensor_subclass_takes_precedence(tracked):
    marked = X.as_subclass(Marked)
    for result in (F.linear(marked, tracked.first), torch.stack([tracked.first[0], tracked.first[1], marked[0]])):
        assert type(result) is Marked
    assert type(F.linear(X, tracked.first)) is torch.Tensor
    assert tracked.buckets == [0, 0, 0, 0]


def test_an_unreferenced_owner_is_freed_and_its_parameters_are_plain_again():
    class Owner:
        def __init__(self, parameter):
            self.parameter = parameter
            self.uses = ParamAccess([[parameter]])
            self.uses.sink = self

        def before_access(self, bucket):
            raise AssertionError

    parameter = nn.Parameter(torch.ones(2))
    gone = weakref.ref(Owner(parameter))
    gc.collect()
    assert gone() is None
    assert type(parameter) is nn.Parameter
    # Also if a parameter refers to its owner.
    held = Owner(parameter)
    vars(held.parameter)["owner"] = held
    gone = weakref.ref(held)
    del held, parameter
    gc.collect()
    assert gone() is None
