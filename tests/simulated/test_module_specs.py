"""Module specs: a meta model has those of the real one; only modules that compute what a kind says are of that kind."""

import torch
from torch import nn
from torch.nn.utils.parametrizations import weight_norm

from fourfold.axes.tensor.attach.module_specs import module_specs, tied_names
from fourfold.axes.tensor.rules.layout import tensor_layout
from fourfold.tasks.lm import LanguageModel


class ScaledEmbedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input) * 2


class RootNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.heads, self.is_causal, self.scale, self._cache = 2, True, 0.5, 3
        self.embedding = nn.Embedding(6, 4)
        self.scaled = ScaledEmbedding(6, 4)
        self.linear = nn.Linear(4, 6)
        self.computed = weight_norm(nn.Linear(4, 4))
        self.norm, self.other_norm, self.groups = nn.LayerNorm(4), RootNorm(), nn.GroupNorm(2, 4)
        self.conv = nn.Conv2d(4, 4, 3)
        self.attention = nn.MultiheadAttention(4, 2)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8)
        self.renormalized = nn.Embedding(6, 4, max_norm=1.0)
        self.own = self.same = nn.Parameter(torch.zeros(3))
        self.linear.weight = self.embedding.weight
        self.again = self.norm


def test_each_module_has_its_kind():
    specs = {spec.name: spec for spec in module_specs(Everything())}
    assert {name: spec.kind for name, spec in specs.items() if "." not in name} == {
        "": "other",
        "embedding": "embedding",
        "scaled": "other",
        "linear": "linear",
        "computed": "linear",
        "norm": "norm",
        "other_norm": "norm",
        "groups": "group_norm",
        "conv": "convolution",
        "attention": "attention",
        "encoder": "other",
        "renormalized": "other",
    }
    assert specs["renormalized"].class_name == "Embedding with max_norm"
    assert dict(specs[""].parameters) == {"own": (3,), "same": (3,)}
    assert dict(specs[""].counts) == {"heads": 2}
    assert dict(specs["linear"].parameters) == {"weight": (6, 4), "bias": (6,)}
    assert "weight" not in specs["computed"].parameters
    # Its parent reads the weights of both in evaluation, so they cannot be split.
    assert {specs["encoder.linear1"].kind, specs["encoder.linear2"].kind} == {"other"}


def test_a_meta_model_has_the_specs_and_names_of_the_real_one():
    with torch.device("meta"):
        meta = Everything()
    assert module_specs(meta) == module_specs(Everything())
    assert tied_names(meta) == {
        "same": "own",
        "linear.weight": "embedding.weight",
        "again.weight": "norm.weight",
        "again.bias": "norm.bias",
    }


def test_the_layout_has_every_parameter_of_a_model_under_every_name():
    model = LanguageModel(width=16, layers=2, heads=4, kv_heads=2)
    model.head.weight = model.embedding.weight
    rules = {"embedding": "vocabulary", "head": "vocabulary", "blocks.*.mlp.gate_up": "column(2)"}
    layout = tensor_layout(module_specs(model), tied_names(model), rules, 2)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters(remove_duplicate=False)}
    assert {name: shards[0].shape for name, shards in layout.shards.items()} == shapes
