"""Describe the tensor axis: which layers are split, what a rank holds of their weights, and what they send.

Law: the shards are those that a step cuts; layers that differ only in a number of their names are one row.
"""

import re
from collections.abc import Mapping

from torch import nn

from fourfold.analysis.describe_programs import indent
from fourfold.plan.tensor_dims import TensorSpec
from fourfold.plan.tensor_rules import Style
from fourfold.step.tensor.tensor_axis import model_layout
from fourfold.words.layout import Change
from fourfold.words.text_table import align_columns

NOTHING = "–"
# What a layer's activations need in forward, and their gradients in backward.
SENT: Mapping[Style, tuple[str, str]] = {
    Style.COLUMN: (NOTHING, Change.ALL_REDUCE),
    Style.ROW: (Change.ALL_REDUCE, NOTHING),
    Style.REPLICATED: (NOTHING, f"{Change.ALL_REDUCE} of the weight's gradient"),
}
EMBEDDING, HEAD = (Change.ALL_REDUCE, NOTHING), (f"{Change.ALL_GATHER} of the logits", Change.ALL_REDUCE)


def format_tensor(model: nn.Module, rules: Mapping[str, str], spec: TensorSpec) -> str:
    """The split layers of a model, and what the first tensor rank holds of all its parameters."""
    layout = model_layout(model, rules, spec)
    rows: dict[tuple[str, ...], int] = {}
    for name, style in layout.styles.items():
        module = model.get_submodule(name)
        forward, backward = _sent(style, module)
        shard = layout.shards[f"{name}.weight"][0]
        shapes = (" × ".join(map(str, shape)) for shape in (shard.shape, shard.local_shape))
        row = (re.sub(r"\b\d+\b", "*", name), str(style), *shapes, forward, backward)
        rows[row] = rows.get(row, 0) + 1
    parameters = {name: layout.shards[name] for name, _ in model.named_parameters()}
    whole = sum(p.numel() for p in model.parameters())
    held = sum(shards[0].num_elements for shards in parameters.values())
    table = [("layer", "", "style", "weight", "on a rank", "in forward", "in backward")]
    table += [(row[0], f"× {count}" if count > 1 else "", *row[1:]) for row, count in rows.items()]
    lines = [f"a rank holds {held:,} of {whole:,} elements", *align_columns(table, "<<<<<<<")]
    return "tensor   layers that are split; all others are whole on every rank\n" + indent(lines)


def _sent(style: Style, module: nn.Module) -> tuple[str, str]:
    """What is sent in forward and in backward."""
    if style is Style.VOCABULARY:
        return EMBEDDING if isinstance(module, nn.Embedding) else HEAD
    return SENT[style]
