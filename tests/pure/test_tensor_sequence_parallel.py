"""Split residuals: which modules split, gather and sum follows from the modules of a model and its rules."""

import re
from collections.abc import Iterable, Mapping

import pytest

from fourfold.axes.tensor.rules.layers import resolve_layers
from fourfold.axes.tensor.rules.sequence_parallel import (
    BlockTraffic,
    SequenceParallelLayout,
    block_traffic,
    sequence_parallel_layout,
)
from fourfold.axes.tensor.rules.styles import ModuleSpec, Style
from fourfold.words.errors import PlanError

WEIGHT, VECTOR = {"weight": (8, 8)}, {"weight": (8,)}
Model = Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]]


def specs(model: Model) -> list[ModuleSpec]:
    """The modules of a model, with those around them."""
    names: dict[str, None] = {"": None}
    for name in model:
        parts = name.split(".")
        names |= dict.fromkeys(".".join(parts[: count + 1]) for count in range(len(parts)))
    return [ModuleSpec(name, *model.get(name, ("other", {})), {}, name.rpartition(".")[2]) for name in names]


def styles_of(model: Model, rules: Mapping[str, str]) -> dict[str, Style]:
    layers, problems = resolve_layers(specs(model), rules)
    assert not problems
    return {layer.module.name: layer.rule.style for layer in layers}


def layout(model: Model, rules: Mapping[str, str]) -> SequenceParallelLayout:
    return sequence_parallel_layout(specs(model), styles_of(model, rules))


def block(name: str, *layers: str) -> dict[str, tuple[str, Mapping[str, tuple[int, ...]]]]:
    kinds = {"norm": ("norm", VECTOR), "gain": ("other", VECTOR)}
    return {f"{name}.{layer}": kinds.get(re.sub(r"\d|.*\.", "", layer), ("linear", WEIGHT)) for layer in layers}


def joined(*parts: Mapping[str, tuple[str, Mapping[str, tuple[int, ...]]]]) -> Model:
    return {name: each for part in parts for name, each in part.items()}


PRE_NORM = ("norm1", "attention.qkv", "attention.out", "norm2", "mlp.up", "mlp.down")
RULES = {
    "blocks.*.attention.qkv": "column",
    "blocks.*.attention.out": "row",
    "blocks.*.mlp.up": "column",
    "blocks.*.mlp.down": "row",
}
EMBEDDING = {"embedding": ("embedding", WEIGHT)}
NORM, HEAD = {"norm": ("norm", VECTOR)}, {"head": ("linear", WEIGHT)}


def names(*found: Iterable[str]) -> list[list[str]]:
    return [sorted(each) for each in found]


def test_blocks_with_a_norm_behind_them():
    model = joined(EMBEDDING, block("blocks.0", *PRE_NORM), block("blocks.1", *PRE_NORM), NORM, HEAD)
    found = layout(model, {**RULES, "embedding": "vocabulary", "head": "vocabulary"})
    assert found.blocks == ("blocks.0", "blocks.1")
    assert names(found.entries, found.exits) == [["blocks.0"], ["norm"]]
    assert sorted(found.containers) == [f"blocks.{n}.{name}" for n in (0, 1) for name in ("attention", "mlp")]
    assert sorted(found.summed) == [f"blocks.{n}.norm{m}" for n in (0, 1) for m in (1, 2)] + ["norm"]
    assert sorted(found.rows) == [f"blocks.{n}.{name}" for n in (0, 1) for name in ("attention.out", "mlp.down")]


def test_row_layers_in_modules_of_their_own():
    """As in BERT: the norms stand behind the sums, and no norm behind the blocks."""
    layers = ("attention.self.query", "attention.output.dense", "attention.output.norm", "up.dense", "down.dense",
              "down.norm")  # fmt: skip
    rules = {"layer.*.attention.self.query": "column", "layer.*.attention.output.dense": "row"}
    rules |= {"layer.*.up.dense": "column", "layer.*.down.dense": "row"}
    found = layout(joined(block("layer.0", *layers), {"pooler": ("linear", WEIGHT)}, NORM), rules)
    assert names(found.entries, found.exits) == [["layer.0"], ["layer.0"]]
    assert sorted(found.containers) == ["layer.0.attention.self", "layer.0.up"]
    assert sorted(found.summed) == ["layer.0.attention.output.norm", "layer.0.down.norm"]


def test_modules_with_rules_or_inside_of_containers_are_not_summed():
    layers = (*PRE_NORM, "attention.q_norm", "attention.gate", "gain", "norm3")
    model = joined(block("blocks.0", *layers), {"blocks.0": ("other", VECTOR)})
    found = layout(model, {**RULES, "blocks.*.norm3": "replicated"})
    assert sorted(found.summed) == ["blocks.0", "blocks.0.gain", "blocks.0.norm1", "blocks.0.norm2"]


def test_layers_within_layers_are_gathered_for_once():
    found = layout(
        joined(block("blocks.0", "moe.up", "moe.experts.0.up", "moe.experts.0.down")),
        {"blocks.*.moe.up": "column", "blocks.*.moe.experts.*.up": "column", "blocks.*.moe.experts.*.down": "row"},
    )
    assert (found.blocks, found.containers) == (("blocks.0",), {"blocks.0.moe"})


def test_lists_each_split_and_gather():
    model = joined(
        *(block(f"stages.{n}.blocks.0", "mlp.up", "mlp.down") for n in (0, 1)),
        {"stages.0.merge": ("linear", WEIGHT), "stages.1.norm": ("norm", VECTOR)},
    )
    found = layout(model, {"stages.*.blocks.*.mlp.up": "column", "stages.*.blocks.*.mlp.down": "row"})
    assert names(found.entries) == [["stages.0.blocks.0", "stages.1.blocks.0"]]
    assert names(found.exits, found.summed) == [["stages.0.blocks.0", "stages.1.norm"], ["stages.1.norm"]]


def test_a_sequential_model():
    model = joined(
        {"0": ("embedding", WEIGHT)}, block("1", "mlp.up", "mlp.down"), {"2": ("norm", VECTOR)},
        block("3", "mlp.up", "mlp.down"), {"4": ("norm", VECTOR), "5": ("linear", WEIGHT)},
    )  # fmt: skip
    found = layout(model, {"*.mlp.up": "column", "*.mlp.down": "row", "0": "vocabulary", "5": "vocabulary"})
    assert (found.blocks, found.entries, found.exits) == (("1", "3"), {"1"}, {"4"})
    assert found.summed == {"2", "4"}


def test_layers_outside_of_blocks_stay_as_they_are():
    model = joined(block("blocks.0", *PRE_NORM), {"pooler.up": ("linear", WEIGHT), "pooler.down": ("linear", WEIGHT)})
    found = layout(model, {**RULES, "pooler.up": "column", "pooler.down": "row"})
    assert found.exits == {"blocks.0"}
    assert not {"pooler", "pooler.down"} & (found.containers | found.rows)


@pytest.mark.parametrize(("model", "rules", "message"), [
    (
        block("blocks.0", "up", "down"),
        {"blocks.*.up": "column", "blocks.*.down": "row"},
        r"the column layer blocks\.\*\.up directly in the block, a 0 .*a module around it inside of the block",
    ),
    (block("model", "up", "down"), {"model.up": "column", "model.down": "row"}, "a model without blocks"),
    (
        joined(
                block("blocks.0", "mlp.up", "mlp.down"),
                block("blocks.1", "mixer"),
                block("blocks.2", "mlp.up", "mlp.down"),
            ),
        {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row"},
        r"blocks\.1, a 1 without split layers between blocks.*split layers in each block",
    ),
    (
        block("blocks.0", "mlp.up", "mlp.down", "head"),
        {"blocks.*.mlp.up": "column", "blocks.*.mlp.down": "row", "blocks.*.head": "vocabulary"},
        r'"vocabulary" for blocks\.\*\.head, inside of a block',
    ),
    (
        {f"blocks.0.mix.{name}": ("convolution", {"weight": (8, 8, 3)}) for name in ("up", "down")},
        {"blocks.*.mix.up": "column", "blocks.*.mix.down": "row"},
        r"2 problems(.|\n)*blocks\.\*\.mix\.up, a up, inside of a block.*which have no channels",
    ),
], ids=["container", "no blocks", "gap", "vocabulary", "channels"])  # fmt: skip
def test_what_cannot_be_split_is_rejected(model, rules, message):
    with pytest.raises(PlanError, match=message) as error:
        layout(model, rules)
    assert "sequence_parallel = false" in str(error.value)


@pytest.mark.parametrize("tp", [2, 4])
def test_a_block_costs_what_the_formula_says(tp):
    """Per token 8 · D · (t - 1) / t elements, and 10 where residuals are split. Queries and keys read one tensor."""
    layers = {
        "blocks.0.attention.q": ("linear", {"weight": (8, 4)}),
        "blocks.0.attention.kv": ("conv1d", {"weight": (4, 16), "bias": (16,)}),
        "blocks.0.attention.out": ("linear", {"weight": (4, 8), "bias": (4,)}),
        "blocks.0.norm": ("norm", {"weight": (4,), "bias": (4,)}),
        "blocks.0.mlp.up": ("linear", {"weight": (16, 4)}),
        "blocks.0.mlp.down": ("conv1d", {"weight": (16, 4)}),
    }
    rules = {f"blocks.*.{name}": "column" for name in ("attention.q", "attention.kv", "mlp.up")}
    rules |= {f"blocks.*.{name}": "row" for name in ("attention.out", "mlp.down")}
    model = specs(layers)
    found = block_traffic("blocks.0", model, styles_of(layers, rules), layout(layers, rules), tp)
    assert found == BlockTraffic(8 * 4 * (tp - 1) / tp, 10 * 4 * (tp - 1) / tp, 2 * 12 * (tp - 1) / tp)
