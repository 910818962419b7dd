"""Tensor rules of transformers' models: each layer that should be split is, and a cut model computes as the whole."""

import copy
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import Tensor, nn

from fourfold.axes.tensor.attach.module_specs import module_kind, module_specs, tied_names
from fourfold.axes.tensor.attach.transformers_rules import rules_of_transformers
from fourfold.axes.tensor.rules.layout import tensor_layout
from fourfold.axes.tensor.work.layers import cut_model, local_part
from fourfold.axes.tensor.work.split_region import SplitRegion
from fourfold.comm.meter import CommMeter
from fourfold.comm.tensor_group import make_tensor_group
from fourfold.testing import threads
from fourfold.torch_kit.deferred_init import InitialModel
from fourfold.words.errors import PlanError
from tests.simulated.test_transformers import KeepFloat64

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "vocab_size": 50,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": 6, "tie_word_embeddings": False}
GPT2 = {"n_embd": 32, "n_head": 8, "n_layer": 2, "vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
NORMS = {"input_layernorm.weight", "post_attention_layernorm.weight", "norm.weight"}
HEAD_NORMS = {"q_norm.weight", "k_norm.weight"}
GPT2_WHOLE = {f"{name}.{kind}" for name in ("ln_1", "ln_2", "ln_f") for kind in ("weight", "bias")} | {
    "wpe.weight",
    "c_proj.bias",
}
BERT_WHOLE = {
    "position_embeddings.weight",
    "token_type_embeddings.weight",
    "LayerNorm.weight",
    "LayerNorm.bias",
    "output.dense.bias",
    "transform.dense.weight",
    "transform.dense.bias",
}
# model -> its config, and the ends of the names of all its parameters that are not split
MODELS = {
    "LlamaForCausalLM": (SIZES | GROUPED, NORMS),
    "Qwen2ForCausalLM": (SIZES | GROUPED | {"tie_word_embeddings": True}, NORMS),
    "Qwen3ForCausalLM": (SIZES | GROUPED, NORMS | HEAD_NORMS),
    "MistralForCausalLM": (SIZES | GROUPED, NORMS),
    "GemmaForCausalLM": (SIZES | GROUPED | {"tie_word_embeddings": True}, NORMS),
    "LlamaModel": (SIZES | GROUPED, NORMS),
    "GPT2LMHeadModel": (GPT2, GPT2_WHOLE),
    "GPT2Model": (GPT2, GPT2_WHOLE),
    "BertForMaskedLM": (SIZES, BERT_WHOLE),
    "BertModel": (SIZES, BERT_WHOLE | {"pooler.dense.weight", "pooler.dense.bias"}),
}


def meta_model(name, sizes):
    with torch.device("meta"):
        return getattr(transformers, name)(getattr(transformers, name).config_class(**sizes))


def layout_of(model, tp):
    return tensor_layout(module_specs(model), tied_names(model), rules_of_transformers(model), tp)


@pytest.mark.parametrize("name", MODELS)
def test_every_layer_that_should_be_split_is(name):
    sizes, whole = MODELS[name]
    layout = layout_of(meta_model(name, sizes), 4)
    found = {name for name, shards in layout.shards.items() if shards[0].is_whole}
    expected = {name for name in layout.shards if name.endswith(tuple(whole))}
    assert found == {name for name in expected if not name.endswith("intermediate.dense.bias")}
    replicated = {name.rpartition(".")[2] for name, style in layout.styles.items() if style == "replicated"}
    assert replicated == ({"q_norm", "k_norm"} if name.startswith("Qwen3") else set())


class Trial(NamedTuple):
    output: Tensor
    grads: dict[str, Tensor]


def trial(model) -> Trial:
    """Output and gradients of a fixed function of it, in float64."""
    tokens = torch.arange(24).reshape(3, 8) * 7 % 50
    with KeepFloat64():
        output = model(tokens)[0]
        (output * torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view_as(output)).sum().backward()
    return Trial(output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None})


def real_model(name, sizes):
    """In float64, with weights that all matter, without dropout."""
    config = getattr(transformers, name).config_class(**sizes)
    for key in [key for key in config.to_dict() if "drop" in key]:
        setattr(config, key, 0.0)
    torch.manual_seed(3)
    model = getattr(transformers, name)(config).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.covering
@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_model_cut_by_its_rules_computes_as_the_whole_one(name, tp):
    model = real_model(name, MODELS[name][0])
    layout = layout_of(model, tp)
    local_models = [copy.deepcopy(model) for _ in range(tp)]
    whole = trial(model)

    def body(comm):
        local_model = local_models[comm.rank]
        region = SplitRegion(make_tensor_group(comm, "tensor", CommMeter()))
        cut_model(InitialModel(local_model), layout, region, comm, lambda name: True)
        return trial(local_model)

    trials = threads.run(tp, body)
    for module in local_models[0].modules():
        if hasattr(module, "nf"):
            assert (module.nx, module.nf) == module.weight.shape
    for index, local in enumerate(trials):
        assert torch.allclose(local.output, whole.output, rtol=1e-10, atol=1e-10)
        assert local.grads.keys() == whole.grads.keys()
        for key, grad in local.grads.items():
            expected = local_part(whole.grads[key], layout.shards[key][index])
            assert torch.allclose(grad, expected, rtol=1e-10, atol=1e-10), key


def test_heads_of_keys_and_values_are_whole_heads_in_each_place():
    layout = layout_of(meta_model("LlamaForCausalLM", SIZES | GROUPED), 4)
    shards = layout.shards["model.layers.1.self_attn.k_proj.weight"]
    assert [shard.pieces[0][:] for shard in shards] == [(0, 6, 0, 2), (0, 6, 1, 2), (6, 12, 0, 2), (6, 12, 1, 2)]
    assert layout.counts["model.layers.1.self_attn"] == {"num_key_value_groups": 2}


def test_gpt2s_places_hold_the_same_heads_of_queries_keys_and_values():
    layout = layout_of(meta_model("GPT2LMHeadModel", GPT2), 4)
    shard = layout.shards["transformer.h.0.attn.c_attn.weight"][1]
    assert shard.dim == 1
    assert [(piece.start, piece.stop) for piece in shard.pieces] == [(8, 16), (40, 48), (72, 80)]
    assert layout.counts["transformer.h.0.attn"] == {"num_heads": 2, "split_size": 8}


def test_the_bias_of_berts_head_is_split_under_both_of_its_names():
    layout = layout_of(meta_model("BertForMaskedLM", SIZES), 4)
    assert layout.shards["cls.predictions.bias"] == layout.shards["cls.predictions.decoder.bias"]
    assert [shard.local_shape for shard in layout.shards["cls.predictions.bias"]] == [(13,), (13,), (13,), (11,)]


@pytest.mark.parametrize(
    ("name", "sizes", "split"),
    [
        ("GPT2LMHeadModel", GPT2, "h.1.crossattention.c_attn"),
        ("BertForMaskedLM", SIZES | {"is_decoder": True}, "layer.1.crossattention.self.key"),
    ],
)
def test_cross_attention_is_split_where_it_is(name, sizes, split):
    layout = layout_of(meta_model(name, sizes | {"add_cross_attention": True}), 2)
    assert [module for module in layout.styles if module.endswith(split)]


def test_a_model_within_another_module_is_found_once():
    inner = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    rules = rules_of_transformers(nn.ModuleDict({"net": inner}))
    assert rules == {f"net.{pattern}": rule for pattern, rule in rules_of_transformers(inner).items()}
    assert rules["net.model.layers.*.self_attn.k_proj"] == "column(kv_heads=2)"
    assert rules_of_transformers(nn.Linear(2, 2)) == {}


def test_rules_name_the_counts_of_heads():
    rules = rules_of_transformers(meta_model("LlamaForCausalLM", SIZES | GROUPED))
    attention = {name.rpartition(".")[2]: rule for name, rule in rules.items() if "self_attn" in name}
    kv = "column(kv_heads=2)"
    assert attention == {"q_proj": "column(heads=8)", "k_proj": kv, "v_proj": kv, "o_proj": "row(heads=8)"}
    rules = rules_of_transformers(meta_model("BertModel", SIZES))
    assert rules["encoder.layer.*.attention.output.dense"] == "row(num_attention_heads=8)"


def test_layers_whose_configs_differ_have_rules_of_their_own():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    attention = model.model.layers[1].self_attn
    attention.config = copy.deepcopy(attention.config)
    attention.config.num_key_value_heads = 1
    rules = rules_of_transformers(model)
    found = {name: rule for name, rule in rules.items() if name.endswith(".k_proj")}
    assert found == {
        "model.layers.0.self_attn.k_proj": "column(kv_heads=2)",
        "model.layers.1.self_attn.k_proj": "column(kv_heads=1)",
    }


def test_attention_that_counts_its_heads_gets_local_counts():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    for layer in model.model.layers:
        layer.self_attn.num_heads, layer.self_attn.num_key_value_heads = 8, 2
    counts = layout_of(model, 4).counts["model.layers.0.self_attn"]
    assert counts == {"num_heads": 2, "num_key_value_heads": 1, "num_key_value_groups": 2}


class OtherEmbedding(nn.Embedding):
    def forward(self, input):
        return super().forward(input).tanh()


@pytest.mark.parametrize("tied", [False, True])
def test_an_embedding_that_cannot_be_split_stays_whole_and_so_does_a_head_that_shares_its_weight(tied):
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    model.model.embed_tokens = OtherEmbedding(50, 32, device="meta")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    layout = layout_of(model, 2)
    assert layout.shards["model.embed_tokens.weight"][0].is_whole
    assert layout.shards["lm_head.weight"][0].is_whole == tied


def test_only_embeddings_that_return_rows_or_multiples_of_them_are_embeddings():
    bart = transformers.models.bart.modeling_bart
    with torch.device("meta"):
        scaled = bart.BartScaledWordEmbedding(6, 4, 0, embed_scale=2.0)
        positions = bart.BartLearnedPositionalEmbedding(6, 4)
    assert (module_kind(scaled), module_kind(positions)) == ("embedding", "other")


def test_entries_of_a_plan_for_layers_that_the_model_lacks_mean_nothing():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    rules = rules_of_transformers(model)
    model.tp_plan = {**model.tp_plan, "model.layers.*.mlp.experts": "moe_tp_experts", "model.norm": "replicate"}
    assert rules_of_transformers(model) == rules


def test_an_input_that_is_no_embedding_stays_as_the_plan_says():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    model.get_input_embeddings = lambda: model.model.layers
    rules = rules_of_transformers(model)
    assert rules["lm_head"] == rules["model.embed_tokens"] == "vocabulary"
    assert "model.layers" not in rules


def test_a_model_that_names_no_input_embedding_has_the_rules_of_its_plan():
    model = meta_model("LlamaModel", SIZES | GROUPED)
    rules = rules_of_transformers(model)

    def refuse():
        raise NotImplementedError

    model.get_input_embeddings = refuse
    assert rules_of_transformers(model) == rules


def test_attention_whose_config_counts_no_heads_is_refused():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    for layer in model.model.layers:
        layer.self_attn.config = None
    assert problems_of(model)[0] == (
        '"model.layers.*.self_attn.q_proj" is in a LlamaAttention whose config does not count its heads',
        "num_attention_heads in its config",
        "rules of your own, tensor={…}",
    )


def problems_of(model):
    with pytest.raises(PlanError) as caught:
        rules_of_transformers(model)
    return [tuple(problem) for problem in caught.value.problems]


def test_styles_that_we_lack_are_refused_by_name():
    experts = SIZES | GROUPED | {"num_local_experts": 2}
    need = "colwise, rowwise, embedding_rowwise or replicated_with_grad_allreduce, of a layer"
    attempt = "rules of your own, tensor={…}; what they leave out stays whole"
    assert problems_of(meta_model("MixtralForCausalLM", experts)) == [
        (f'"model.layers.*.mlp.{name}" is "{style}" in transformers\' plan of MixtralForCausalLM', need, attempt)
        for name, style in (
            ("experts.gate_up_proj", "packed_colwise"),
            ("experts.down_proj", "rowwise"),
            ("experts", "moe_tp_experts"),
        )
    ]
    fused = problems_of(meta_model("Phi3ForCausalLM", SIZES | {"num_key_value_heads": 2}))
    assert [got.partition(" in ")[0] for got, _, _ in fused] == [
        '"model.layers.*.self_attn.qkv_proj" is "colwise_gather_output"',
        '"model.layers.*.self_attn.o_proj" is "rowwise_split_input"',
        '"model.layers.*.mlp.gate_up_proj" is "colwise_gather_output"',
        '"model.layers.*.mlp.down_proj" is "rowwise_split_input"',
    ]


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("DistilBertModel", {"dim": 32, "n_heads": 4, "n_layers": 1}),
        ("ViTModel", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}),
    ],
)
def test_a_model_without_rules_is_refused_by_name(name, sizes):
    ((got, need, _),) = problems_of(meta_model(name, sizes))
    assert got == f"transformers has no tensor plan for {name}, and Fourfold has no rules for it"
    assert need == "a model with one, such as Llama, or one of ours: gpt2, bert"


def test_layers_with_other_heads_than_their_config_are_refused():
    model = meta_model("LlamaForCausalLM", SIZES | GROUPED)
    model.config.num_attention_heads = 3
    assert (
        '"model.layers.*.self_attn.q_proj" has 48 features, its config counts 3 heads, and its heads have 6',
        "features for each of the heads",
        "rules of your own, tensor={…}",
    ) in problems_of(model)
