"""Tensor rules of Hugging Face models: from transformers' own plan of a model, or from our table for those without one.

plan     a model's `tp_plan`: pattern of names -> style. It comes from its class and from its config
base     the model without its head; patterns of our tables are of its modules
heads    counted by the config; attention splits its projections between heads
Law: what a plan says of a model and we cannot do is a problem with its name, never a layer that silently stays whole.
"""

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

from fourfold.axes.tensor.attach.module_specs import module_kind
from fourfold.axes.tensor.rules.styles import Style, matches
from fourfold.words.errors import PlanError, Problem

# A style of transformers -> ours. Those that gather their output are the vocabulary's only, see `_rule`.
STYLES = {
    "colwise": Style.COLUMN,
    "rowwise": Style.ROW,
    "embedding_rowwise": Style.VOCABULARY,
    "replicated_with_grad_allreduce": Style.REPLICATED,
}
WHOLE_STYLES = ("replicate",)
QUERY_LAYERS, KEY_VALUE_LAYERS, OUTPUT_LAYERS = ("q_proj",), ("k_proj", "v_proj"), ("o_proj",)
# Attributes in which attention modules of transformers may count their heads.
HEADS_ATTRIBUTES = ("num_heads", "num_attention_heads")
KV_HEADS_ATTRIBUTES = ("num_key_value_heads", "num_kv_heads")


class Table(NamedTuple):
    """Rules by pattern, of the base; `{heads}` is the config's. `optional` ones may match nothing."""

    rules: Mapping[str, str]
    optional: Mapping[str, str]


def _bert_attention(name: str) -> dict[str, str]:
    layer = f"encoder.layer.*.{name}"
    return {
        f"{layer}.self.query": "column(num_attention_heads; all_head_size)",
        f"{layer}.self.key": "column(num_attention_heads)",
        f"{layer}.self.value": "column(num_attention_heads)",
        f"{layer}.output.dense": "row(num_attention_heads={heads})",
    }


# By the model type of the config: models for which transformers has no plan.
TABLES = {
    "gpt2": Table(
        {
            "h.*.attn.c_attn": "column(num_heads, num_heads, num_heads; split_size)",
            "h.*.attn.c_proj": "row(num_heads)",
            "h.*.mlp.c_fc": "column",
            "h.*.mlp.c_proj": "row",
        },
        {
            "h.*.crossattention.q_attn": "column(num_heads)",
            "h.*.crossattention.c_attn": "column(num_heads, num_heads; split_size)",
            "h.*.crossattention.c_proj": "row(num_heads)",
        },
    ),
    "bert": Table(
        {
            **_bert_attention("attention"),
            "encoder.layer.*.intermediate.dense": "column",
            "encoder.layer.*.output.dense": "row",
        },
        _bert_attention("crossattention"),
    ),
}


def rules_of_transformers(model: nn.Module) -> dict[str, str]:
    """Rules for the models of transformers in `model`, by pattern of its module names; empty if it has none.

    Raises PlanError, all problems at once: for a model with neither a plan nor a table, and for styles that we lack.
    """
    rules: dict[str, str] = {}
    problems: list[Problem] = []
    for name, pretrained in _outermost_models(model):
        prefix = f"{name}." if name else ""
        found = _rules_of(pretrained, problems)
        rules |= {f"{prefix}{pattern}": rule for pattern, rule in found.items()}
    if problems:
        raise PlanError(list(dict.fromkeys(problems)), where="the tensor rules of transformers")
    return rules


def _outermost_models(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """The models of transformers that are in no other one, with their names. Does not import transformers."""
    models = getattr(sys.modules.get("transformers"), "PreTrainedModel", ())
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, models) and not inside:
            found.append(name)
            yield name, module


def _rules_of(model: Any, problems: list[Problem]) -> dict[str, str]:
    """The rules of one model of transformers, by pattern of its own module names."""
    if model.tp_plan:
        rules = _rules_of_plan(model, problems)
    elif table := TABLES.get(model.config.model_type):
        rules = _rules_of_table(model, table)
    else:
        got = f"transformers has no tensor plan for {type(model).__name__}, and Fourfold has no rules for it"
        need = f"a model with one, such as Llama, or one of ours: {', '.join(TABLES)}"
        problems.append(Problem(got, need, 'tensor={"layers.*.mlp.up": "column", …}, rules of your own'))
        return {}
    return rules | dict.fromkeys(_vocabulary_layers(model), str(Style.VOCABULARY))


# ---- the vocabulary --------------------------------------------------------------------------------


def _vocabulary_layers(model: Any) -> list[str]:
    """The embedding of the input and the head, by name, if they can be split.

    Neither, if one of two that share their weight cannot.
    """
    layers = [layer for layer in (_input_embedding(model), model.get_output_embeddings()) if layer is not None]
    names = {id(module): name for name, module in model.named_modules()}
    splittable = [layer for layer in layers if module_kind(layer) in ("embedding", "linear")]
    if len(splittable) < len(layers) and len({id(getattr(layer, "weight", layer)) for layer in layers}) < len(layers):
        return []
    return [names[id(layer)] for layer in splittable]


def _input_embedding(model: Any) -> nn.Module | None:
    try:
        return model.get_input_embeddings()
    except NotImplementedError:  # A model of images or sounds.
        return None


# ---- transformers' plans ---------------------------------------------------------------------------


def _rules_of_plan(model: Any, problems: list[Problem]) -> dict[str, str]:
    """Our rules for a model's `tp_plan`, without its vocabulary."""
    modules = dict(model.named_modules())
    names = [*modules, *(name for name, _ in model.named_parameters())]
    vocabulary = {id(layer) for layer in (_input_embedding(model), model.get_output_embeddings())}
    rules = {}
    for pattern, style in model.tp_plan.items():
        found = [name for name in names if matches(pattern, name)]
        if not found or style in WHOLE_STYLES or id(modules.get(found[0])) in vocabulary:
            continue
        if style not in STYLES or not all(name in modules for name in found):
            problems.append(_style_problem(model, pattern, style))
            continue
        texts = {name: _rule(pattern, name, modules, STYLES[style], problems) for name in found}
        # One rule for all, unless their configs differ.
        rules |= {pattern: next(iter(texts.values()))} if len(set(texts.values())) == 1 else texts
    return rules


def _style_problem(model: nn.Module, pattern: str, style: str) -> Problem:
    got = f'"{pattern}" is "{style}" in transformers\' plan of {type(model).__name__}'
    *others, last = STYLES
    need = f"{', '.join(others)} or {last}, of a layer"
    return Problem(got, need, "rules of your own, tensor={…}; what they leave out stays whole")


def _rule(pattern: str, name: str, modules: Mapping[str, nn.Module], style: Style, problems: list[Problem]) -> str:
    """The rule of a layer; with the counts of its heads, if it is a projection of attention."""
    container, _, own_name = name.rpartition(".")
    attention = modules[container]
    if style not in (Style.COLUMN, Style.ROW) or own_name not in QUERY_LAYERS + KEY_VALUE_LAYERS + OUTPUT_LAYERS:
        return str(style)
    config = getattr(attention, "config", None)
    heads = getattr(config, "num_attention_heads", None)
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    is_kv = own_name in KEY_VALUE_LAYERS
    count = kv_heads if is_kv else heads
    if type(count) is not int:
        got = f'"{pattern}" is in a {type(attention).__name__} whose config does not count its heads'
        problems.append(Problem(got, "num_attention_heads in its config", "rules of your own, tensor={…}"))
        return str(style)
    if problem := _head_size_problem(pattern, modules[name], attention, count, style):
        problems.append(problem)
    attributes = KV_HEADS_ATTRIBUTES if is_kv else HEADS_ATTRIBUTES
    present = [attribute for attribute in attributes if vars(attention).get(attribute) == count]
    return f"{style}({present[0]})" if present else f"{style}({'kv_heads' if is_kv else 'heads'}={count})"


def _head_size_problem(pattern: str, layer: Any, attention: nn.Module, count: int, style: Style) -> Problem | None:
    """What is wrong with a layer whose size is not that of the config's heads, as in models whose layers differ."""
    size = vars(attention).get("head_dim")
    length = layer.out_features if style is Style.COLUMN else layer.in_features
    if type(size) is not int or length % (count * size) == 0:
        return None
    got = f'"{pattern}" has {length} features, its config counts {count} heads, and its heads have {size}'
    return Problem(got, "features for each of the heads", "rules of your own, tensor={…}")


# ---- our tables ------------------------------------------------------------------------------------


def _rules_of_table(model: Any, table: Table) -> dict[str, str]:
    """The rules of a table, under the names that the base has in the model."""
    names = [name for name, _ in model.named_modules()]
    base = next(name for name, module in model.named_modules() if module is model.base_model)
    prefix = f"{base}." if base else ""
    rules = {f"{prefix}{pattern}": rule for pattern, rule in table.rules.items()}
    for pattern, rule in table.optional.items():
        if any(matches(f"{prefix}{pattern}", name) for name in names):
            rules[f"{prefix}{pattern}"] = rule
    return {pattern: rule.replace("{heads}", str(model.config.num_attention_heads)) for pattern, rule in rules.items()}
