"""Hugging Face models: attention and masks through transformers' own interfaces, under the name "fourfold".

Left alone, they make masks of a rank's own tokens, as if these were a whole sequence, and take the jumps between a
rank's positions for the borders of packed documents. Here the mask of keys that was given stays one of keys, which the
ring takes along, and whether attention is causal is told beside it.
Law: outside `installed` a model attends as it is configured.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from fourfold.step.batch import find_positions
from fourfold.step.sequence import sdpa_interception
from fourfold.words.errors import Problem, TaskError

ATTENTION_NAME = "fourfold"
# What else an attention module may ask of the function; each changes who attends to whom, or how much.
UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "sliding_window", "position_bias", "head_mask", "cache")


class _InstallState(threading.local):
    depth = 0


_install_state = _InstallState()
_register_lock = threading.Lock()


def has_transformers_model(model: nn.Module) -> bool:
    """Whether some of the model is one of transformers'. It is not imported for this."""
    models = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return models is not None and any(isinstance(module, models) for module in model.modules())


@contextlib.contextmanager
def install_attention(model: nn.Module) -> Iterator[None]:
    """Within, the transformers models in this one attend through `route.attention`."""
    if not has_transformers_model(model):
        yield
        return
    _register_attention()
    before = {id(config): (config, config._attn_implementation) for config in _configs(model)}
    for config, _ in before.values():
        config._attn_implementation_internal = ATTENTION_NAME
    _install_state.depth += 1
    try:
        yield
    finally:
        _install_state.depth -= 1
        for config, implementation in before.values():
            config._attn_implementation_internal = implementation


def check_not_packed(inputs: Mapping[str, Any]) -> None:
    """Raise TaskError for documents packed into a sample: positions that begin again, as transformers reads them."""
    positions = find_positions(inputs)
    if "attention_mask" not in inputs and bool((positions.diff(dim=1) != 1).any()):
        got = "sp > 1 and positions of a transformers model that begin again within a sample (packed documents)"
        need = "one document a sample, or attention_mask for tokens that are none"
        raise TaskError(Problem(got, need, "position_ids = 0, 1, 2 …"), where="the batch")


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            yield config


def _register_attention() -> None:
    """Make the name known to transformers, once."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    with _register_lock:
        if ATTENTION_NAME in AttentionInterface():
            return
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _key_mask)
        found = masking_utils.find_packed_sequence_indices

        def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
            return None if _install_state.depth else found(position_ids)

        masking_utils.find_packed_sequence_indices = find_packed_sequence_indices


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """See transformers' `AttentionInterface`: [B, H, l, D] -> [B, l, H, D]."""
    asked = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if asked:
        got = f"sp > 1 and attention with {' and '.join(asked)} ({type(module).__name__})"
        raise TaskError(Problem(got, "plain or causal attention, with a mask of keys", "sp = 1, and dp instead"))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    grouped = query.shape[1] != key.shape[1]
    out = sdpa_interception.intercepted_sdpa(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=grouped
    )
    return out.transpose(1, 2).contiguous(), None


def _key_mask(
    *, mask_function: Any, attention_mask: Tensor | None = None, use_vmap: bool = False, **_: Any
) -> Tensor | None:
    """See transformers' `AttentionMaskInterface`: a mask of keys, bool [B, 1, 1, l], or None."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if use_vmap or mask_function not in (causal_mask_function, bidirectional_mask_function):
        name = getattr(mask_function, "__qualname__", str(mask_function)).partition(".")[0]
        got = f"sp > 1 and a mask by {name}, made of this rank's tokens"
        raise TaskError(Problem(got, "plain or causal attention, with a mask of keys", "sp = 1, and dp instead"))
    return None if attention_mask is None else attention_mask[:, None, None, :]
