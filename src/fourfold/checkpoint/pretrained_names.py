"""Pretrained names: what files of transformers hold under another name than the model, or besides it.

Law: a tensor that `from_pretrained` would read or skip without a word is read or skipped here too.
"""

import re
from collections.abc import Collection, Iterable

from torch import nn

SKIPPED = r"rotary_emb\.inv_freq$"  # older files of many models; it is computed


def names_in_model(model: nn.Module, names: Iterable[str], own: Collection[str]) -> dict[str, str]:
    """The names of the tensors in files, by the name that each has in the model; without those that are skipped.

    own: the model's names. Files of a model without its head leave out a prefix, and older files have masks.
    """
    prefix = getattr(model, "base_model_prefix", "")
    patterns = [SKIPPED, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())] if prefix else []
    found = {}
    for name in names:
        full = f"{prefix}.{name}"
        if name not in own and full in own:
            found[full] = name
        elif name in own or not any(re.search(pattern, name) for pattern in patterns):
            found[name] = name
    return found
