"""Describe the tensor axis: which layers are split, what a rank holds of their weights, and what they send.

Law: the shards are those that a step cuts; layers that differ only in a number of their names are one row.
"""

import re
from collections.abc import Mapping, Sequence

from torch import nn

from fourfold.axes.tensor.attach.axis import model_layout, model_sequence_parallel
from fourfold.axes.tensor.attach.module_specs import module_specs
from fourfold.axes.tensor.rules.layout import TensorLayout
from fourfold.axes.tensor.rules.sequence_parallel import SequenceParallelLayout, block_traffic, is_in
from fourfold.axes.tensor.rules.styles import Style
from fourfold.plan.plan import Plan
from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.words.layout import Change
from fourfold.words.terminal_text import indent, table_lines
from fourfold.words.units import format_bytes

NOTHING = "–"
# What a layer's activations need in forward, and their gradients in backward.
SENT: Mapping[Style, tuple[str, str]] = {
    Style.COLUMN: (NOTHING, Change.ALL_REDUCE),
    Style.ROW: (Change.ALL_REDUCE, NOTHING),
    Style.CHANNELS: (NOTHING, NOTHING),
    Style.REPLICATED: (NOTHING, f"{Change.ALL_REDUCE} of the weight's gradient"),
}
# The same in blocks whose hidden tensors are split over tokens.
SENT_BY_TOKENS: Mapping[Style, tuple[str, str]] = SENT | {
    Style.COLUMN: (Change.ALL_GATHER, f"{Change.ALL_GATHER}, {Change.REDUCE_SCATTER}"),
    Style.ROW: (Change.REDUCE_SCATTER, Change.ALL_GATHER),
}
# A head that reads what the blocks return, and not a part of it, takes this rank's tokens of the sum.
HEAD_BY_TOKENS = "depends on the loss", f"{Change.REDUCE_SCATTER} or {Change.ALL_REDUCE}"
EMBEDDING, HEAD = (Change.ALL_REDUCE, NOTHING), ("depends on the loss", Change.ALL_REDUCE)


def format_tensor(model: nn.Module, rules: Mapping[str, str], plan: Plan) -> str:
    """The split layers of a model, and what the first tensor rank holds of all its parameters."""
    layout = model_layout(model, rules, plan.tensor_spec)
    split = model_sequence_parallel(model, layout, plan.sequence_parallel)
    rows: dict[tuple[str, ...], int] = {}
    for name, style in layout.styles.items():
        module = model.get_submodule(name)
        in_block = any(is_in(name, each) for each in split.blocks)
        forward, backward = _sent(style, module, in_block=in_block, splits_tokens=bool(split.blocks))
        shapes = [NOTHING, NOTHING]  # of a GroupNorm without a weight
        if shards := layout.shards.get(f"{name}.weight"):
            shapes = [" × ".join(map(str, shape)) for shape in (shards[0].shape, shards[0].local_shape)]
        row = (_numberless(name), str(style), *shapes, forward, backward)
        rows[row] = rows.get(row, 0) + 1
    parameters = {name: layout.shards[name] for name, _ in model.named_parameters()}
    whole = sum(p.numel() for p in model.parameters())
    held = sum(shards[0].num_elements for shards in parameters.values())
    table = [("layer", "", "style", "weight", "on a rank", "in forward", "in backward")]
    table += [(row[0], f"× {count}" if count > 1 else "", *row[1:]) for row, count in rows.items()]
    lines = [f"a rank holds {held:,} of {whole:,} elements", *table_lines(table, "<<<<<<<")]
    text = "tensor   layers that are split; all others are whole on every rank\n" + indent(lines)
    if losses := _loss_lines([row for row in rows if row[-2:] in (HEAD, HEAD_BY_TOKENS)]):
        text += "\n\n" + indent(losses)
    return f"{text}\n\n{_format_sequence_parallel(model, layout, split, plan)}" if split.blocks else text


def _numberless(name: str) -> str:
    return re.sub(r"\b\d+\b", "*", name)


def _loss_lines(heads: Sequence[tuple[str, ...]]) -> list[str]:
    """What each loss sends of a head's logits, and keeps of them for backward."""
    table = [("loss of", "", "in forward", "kept of a target's logits")]
    for name, _, whole, local, *_ in heads:
        num_classes, num_here = (shape.split()[0] for shape in (whole, local))
        table.append((name, "cross entropy", "3 numbers per target", f"{num_here} of {num_classes}"))
        table.append((name, "any other", f"{Change.ALL_GATHER} of the logits", f"what it needs of {num_classes}"))
    return table_lines(table, "<<<<") if heads else []


def _sent(style: Style, module: nn.Module, *, in_block: bool, splits_tokens: bool) -> tuple[str, str]:
    """What is sent in forward and in backward."""
    if style is Style.VOCABULARY:
        head = HEAD_BY_TOKENS if splits_tokens else HEAD
        return EMBEDDING if isinstance(module, nn.Embedding) else head
    return (SENT_BY_TOKENS if in_block else SENT)[style]


def _format_sequence_parallel(model: nn.Module, layout: TensorLayout, split: SequenceParallelLayout, plan: Plan) -> str:
    """What a rank sends for the blocks whose hidden tensors are split."""
    modules, rows = module_specs(model), dict[tuple[str, ...], int]()
    compute = COMPUTE_FORMATS.get(plan.precision)
    for block in split.blocks:
        found = block_traffic(block, modules, layout.styles, split, plan.tp)
        # Of activations, which have the dtype of the weights.
        element_bytes = compute.num_bytes if compute else next(model.get_submodule(block).parameters()).element_size()
        row = (_numberless(block), *(format_bytes(element_bytes * elements) for elements in found))
        rows[row] = rows.get(row, 0) + 1
    table = [("blocks", "", "per token", "without it", "of weights, per backward")]
    table += [
        (name, f"× {count}" if count > 1 else "", split, whole, gradients)
        for (name, whole, split, gradients), count in rows.items()
    ]
    entries, ends = (", ".join(sorted(each)) for each in (split.entries, split.exits))
    where = f"tokens are split from the entry of {entries} to the end of {ends}; there they are gathered"
    lines = [where, *table_lines(table, "<<>>>")]
    return "sequence parallelism   what a rank sends for a block, in forward and backward\n" + indent(lines)
