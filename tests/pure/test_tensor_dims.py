"""Named dims: they lay a model out as the rules by style do, and each mistake has its message."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.tensor.rules.dims import dims_of_rules, dims_on_axis
from fourfold.axes.tensor.rules.layout import tensor_layout
from fourfold.axes.tensor.rules.styles import Style, read_rules
from fourfold.plan.plan import Plan
from fourfold.tasks import lm as language_model
from fourfold.words.errors import PlanError
from tests.pure.test_tensor_rules import LM_RULES, lm, module, split_models

# Each layer's dims, by its rule; `gate_up` and `down` of this model are Conv1D: their weights are [in, out].
LM_DIMS = {
    "embedding": "vocab, model",
    "blocks.*.attention.qkv": "heads(heads, kv_heads, kv_heads), model",
    "blocks.*.attention.out": "model, heads",
    "blocks.*.mlp.gate_up": "model, mlp(2)",
    "blocks.*.mlp.down": "mlp, model",
    "head": "vocab, model",
}
OF_DIM = {"vocab": ("embedding", "head"), "heads": ("attention.qkv", "attention.out"), "mlp": ("gate_up", "down")}
EVERY_DIM = [set(dims) for size in (1, 2, 3) for dims in itertools.combinations(OF_DIM, size)]


@given(split_models(), st.sampled_from(EVERY_DIM))
def test_named_dims_mean_the_rules_by_style(model, dims):
    sizes, tp = model
    styles = {p: text for p, text in LM_RULES.items() if any(p.endswith(end) for d in dims for end in OF_DIM[d])}
    field = "batch:dp " + " ".join(f"{dim}:tp" for dim in dims)
    assert tensor_layout(lm(**sizes), {}, LM_DIMS, tp, field) == tensor_layout(lm(**sizes), {}, styles, tp)


def test_marked_dims_are_split_where_the_plan_has_no_dims():
    marked = LM_DIMS | {"blocks.*.mlp.down": "mlp:tp, model", "head": "vocab : tp, model"}
    assert tensor_layout(lm(), {}, marked, 2) == tensor_layout(lm(), {}, LM_DIMS, 2, "mlp:tp vocab:tp")
    only_heads = tensor_layout(lm(), {}, marked, 2, "heads:tp")
    assert only_heads == tensor_layout(lm(), {}, LM_DIMS, 2, "heads:tp")


def test_the_built_in_model_names_its_dims_and_marks_those_of_megatron():
    assert dims_of_rules(language_model.TENSOR_RULES) == ["vocab", "model", "heads", "mlp"]
    assert dims_on_axis(Plan.recipe("mesh-tensorflow").dims) == ["vocab", "mlp", "heads"]


def test_a_dim_with_the_name_of_an_attribute_is_split_by_its_units():
    modules = [
        module(""),
        module("attention", counts={"heads": 4, "groups": 2}),
        module("attention.q", "linear", weight=(32, 6), bias=(32,)),
        module("attention.k", "linear", weight=(16, 6)),
        module("attention.out", "linear", weight=(6, 32), bias=(6,)),
    ]
    rules = {"attention.q": "heads, model", "attention.k": "heads(groups), model", "attention.out": "model, heads"}
    layout = tensor_layout(modules, {}, rules, 4, "heads:tp")
    assert layout.counts == {"attention": {"heads": 1, "groups": 1}}
    assert layout.styles == {"attention.q": Style.COLUMN, "attention.k": Style.COLUMN, "attention.out": Style.ROW}
    assert [shard.pieces[0].start for shard in layout.shards["attention.k.weight"]] == [0, 0, 8, 8]
    assert layout.shards["attention.q.bias"][0].local_shape == (8,), "the bias follows the outputs"
    assert layout.shards["attention.out.bias"][0].is_whole
    features = tensor_layout(modules, {}, rules | {"attention.q": "units:tp, model", "attention.k": "model, x"}, 2)
    assert features.counts == {}


def test_a_linear_layer_that_makes_the_rows_of_an_embedding_gathers_its_logits():
    modules = [module(""), module("table", "embedding", weight=(7, 4)), module("head", "linear", weight=(7, 4))]
    with_table = tensor_layout(modules, {}, {"table": "words, model", "head": "words, model"}, 2, "words:tp")
    assert with_table.styles == {"table": Style.VOCABULARY, "head": Style.VOCABULARY}
    assert tensor_layout(modules[::2], {}, {"head": "words, model"}, 7, "words:tp").styles == {"head": Style.COLUMN}


def test_rules_by_style_hold_whatever_the_plans_dims_are():
    mixed = {"blocks.*.mlp.gate_up": "column(2)", "blocks.*.mlp.down": "row", "embedding": "vocab, model"}
    assert set(tensor_layout(lm(), {}, mixed, 2, "vocab:tp").styles.values()) == set(Style) - {
        Style.REPLICATED,
        Style.CHANNELS,
    }


def test_dims_are_read_from_a_file():
    assert read_rules('"*.up" = "mlp(2):tp, model"') == {"*.up": "mlp(2):tp, model"}


def problems_of(dims, rules=LM_DIMS, tp=2, modules=None):
    with pytest.raises(PlanError) as caught:
        tensor_layout(modules or lm(), {}, rules, tp, dims)
    return [tuple(problem) for problem in caught.value.problems]


def test_an_unknown_dim_is_named_with_the_closest():
    need = "a dim that the rules name: vocab, model, heads, mlp"
    assert problems_of("head:tp mlp:tp")[0] == ('dims has "head:tp"', need, "heads:tp")
    got, need, attempt = problems_of("heads:tp", LM_RULES)[0]
    assert (got, need) == ('dims has "heads:tp"', "tensor rules that name the dims of weights")
    assert attempt.endswith('"*.down": "model, mlp"}, or no dims')


def test_two_dims_of_one_weight_on_the_axis_are_rejected():
    found = problems_of("model:tp mlp:tp", {p: LM_DIMS[p] for p in ("blocks.*.mlp.gate_up", "blocks.*.mlp.down")})
    assert [got for got, _, _ in found] == [
        '"blocks.*.mlp.gate_up" has the dims model, mlp, and model and mlp are on tp',
        '"blocks.*.mlp.down" has the dims mlp, model, and mlp and model are on tp',
    ]
    assert {need for _, need, _ in found} == {"one dim of a weight on an axis"}


@pytest.mark.parametrize(("rules", "dims", "got", "need"), [
    ({"embedding": "vocab, model"}, "model:tp",
     '"embedding": model on tp splits dim 1 of modules of class embedding',
     "the outputs or inputs of Linear or Conv1D, or the rows of Embedding"),
    ({"head": "vocab, model, more"}, "vocab:tp",
     '"head" names the dims vocab, model, more, and head has a weight of 50 × 32',
     "a name for each dim of the weight, in the order of its shape"),
    ({"blocks.*.attention": "heads, model"}, "heads:tp",
     '"blocks.*.attention" names the dims heads, model, and Attention has no weight',
     "a name for each dim of the weight, in the order of its shape"),
    ({"embedding": "vocab(2), model"}, "vocab:tp", '"embedding": vocab has brackets, and is the rows of an embedding',
     "rows that are split evenly"),
    ({"embeding": "vocab, model"}, "", '"embeding" matches no module',
     "a pattern of module names; * is one name between dots"),
    ({"*": "vocab, model", "head": "vocab, model"}, "", '"*" and "head" match the same layer head',
     "one rule for each layer"),
    ({"head": "vocab, model"}, "batch:dp", "tp = 2, and no rule splits a layer", "one of the dims vocab, model on tp"),
    ({"head": "vocab, column"}, "", '"head": the dims "vocab, column"',
     "a name for each dim of the weight, with the parts of a fused dim in brackets"),
    ({"head": "vocab,"}, "", '"head": the dims "vocab,"',
     "a name for each dim of the weight, with the parts of a fused dim in brackets"),
    ({"head": "vocab(), model"}, "", '"head": the dims "vocab(), model"',
     "a name for each dim of the weight, with the parts of a fused dim in brackets"),
])  # fmt: skip
def test_each_mistake_in_named_dims_has_its_message(rules, dims, got, need):
    assert (got, need) in [problem[:2] for problem in problems_of(dims, rules)]


@pytest.mark.parametrize(("dims", "expected"), [
    ("heads", ('dims has "heads"', "DIM:AXIS, with spaces between them", 'dims = "heads:tp mlp:tp vocab:tp"')),
    ("heads:tp,mlp:tp", ('dims has "heads:tp,mlp:tp"', "DIM:AXIS, with spaces between them",
                         'dims = "heads:tp mlp:tp vocab:tp"')),
    ("heads:model", ('dims has "heads:model"', "an axis: pp, dp, cp, tp", "heads:tp")),
    ("batch:tp", ('dims has "batch:tp"', "the axis that splits the batch, dp", "batch:dp")),
    ("length:dp", ('dims has "length:dp"', "the axis that splits the length, cp", "length:cp")),
    ("mlp:dp", ('dims has "mlp:dp"', "dims of weights to be on tp: dp splits the batch", "mlp:tp")),
    ("mlp:pp", ('dims has "mlp:pp"', "dims of weights to be on tp", "mlp:tp")),
    ("mlp:tp mlp:tp", ("dims has mlp twice", "each dim once", "")),
])  # fmt: skip
def test_a_wrong_field_of_the_plan_is_rejected_before_any_model_is_known(dims, expected):
    with pytest.raises(PlanError) as caught:
        Plan(dims=dims)
    assert [tuple(each) for each in caught.value.problems] == [expected]


def test_dims_of_the_mesh_itself_are_legal_and_without_tp_the_field_has_no_effect():
    plan = Plan(dims="batch:dp length:cp heads:tp")
    assert plan.ineffective_fields == {"dims": "tp above 1"}
    assert Plan.from_toml(plan.to_toml()) == plan
    assert Plan(tp=2, dims=plan.dims).identity_fields == {}
