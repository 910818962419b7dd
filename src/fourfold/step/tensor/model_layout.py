"""How the tensor axis splits a model: the style of each module and the shards of each parameter."""

import fnmatch
from collections.abc import Mapping

from torch import nn

from fourfold.plan.tensor_rules import Style, TensorLayout
from fourfold.plan.tensor_shard import ShardPiece, TensorShard


def model_layout(model: nn.Module, rules: Mapping[str, str], tp: int) -> TensorLayout:
    shards, styles, counts = {}, {}, {}
    for name, p in model.named_parameters():
        shards[name] = tuple(TensorShard.whole(p.shape, i, tp) for i in range(tp))
    for name, module in model.named_modules():
        for pattern, rule in rules.items():
            if fnmatch.fnmatchcase(name, pattern):
                kind, _, inner = rule.partition("(")
                args = [a.strip() for a in inner.rstrip(")").split(",") if a.strip()]
                styles[name] = Style(kind)
                parent = model.get_submodule(name.rpartition(".")[0])
                shape = module.weight.shape
                if kind == "vocabulary":
                    shards[f"{name}.weight"] = tuple(TensorShard.even(shape, 0, i, tp) for i in range(tp))
                elif kind in ("column", "row"):
                    dim = 0 if kind == "column" else 1
                    units = (
                        [1] * int(args[0]) if args and args[0].isdigit() else [getattr(parent, a) for a in args] or [1]
                    )
                    unit = shape[dim] // sum(units)
                    if not args or args[0].isdigit():
                        unit, units = 1, [shape[dim] // len(units)] * len(units)
                    out = []
                    for i in range(tp):
                        pieces, start = [], 0
                        for u in units:
                            if u >= tp:
                                k = u // tp
                                pieces.append(ShardPiece(start + i * k * unit, start + (i + 1) * k * unit))
                            else:
                                r = tp // u
                                pieces.append(ShardPiece(start + i // r * unit, start + (i // r + 1) * unit, i % r, r))
                            start += u * unit
                        out.append(TensorShard(tuple(shape), dim, tuple(pieces)))
                    shards[f"{name}.weight"] = tuple(out)
                    for a in args:
                        if not a.isdigit():
                            counts.setdefault(name.rpartition(".")[0], {})[a] = max(1, getattr(parent, a) // tp)
    return TensorLayout(shards, styles, counts)
