"""Hugging Face models: attention and masks through transformers' own interfaces, under the name "fourfold".

By themselves, these models make masks from a rank's own tokens, as if they were a full sequence, and take gaps between
a rank's positions for the borders of packed documents. Here the given key mask stays a key mask, which travels around
the ring, and `is_causal` is passed separately.
Law: outside `install_attention` a model attends as it is configured.
"""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from fourfold.axes.context.rules.layout import DP_INSTEAD
from fourfold.model import sdpa_interception
from fourfold.words.errors import Problem, TaskError

ATTENTION_NAME = "fourfold"
# Other options that an attention module may pass; each changes which tokens attend to which, or how much.
UNSUPPORTED_OPTIONS = ("softcap", "s_aux", "sliding_window", "position_bias", "head_mask", "cache")


class _InstallState(threading.local):
    depth = 0


_install_state = _InstallState()
_register_lock = threading.Lock()


def has_transformers_model(model: nn.Module) -> bool:
    """Whether the model contains one of transformers. Does not import transformers."""
    models = getattr(sys.modules.get("transformers"), "PreTrainedModel", None)
    return models is not None and any(isinstance(module, models) for module in model.modules())


@contextlib.contextmanager
def install_attention(model: nn.Module) -> Iterator[None]:
    """Within, the transformers models in this model attend through `intercepted_sdpa`."""
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


def _configs(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config = getattr(module, "config", None)
        if hasattr(config, "_attn_implementation_internal"):
            yield config


def _register_attention() -> None:
    """Register the name with transformers, once."""
    from transformers import AttentionInterface, AttentionMaskInterface, masking_utils

    with _register_lock:
        if ATTENTION_NAME in AttentionInterface():
            return
        AttentionInterface.register(ATTENTION_NAME, _attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _key_mask)
        original = masking_utils.find_packed_sequence_indices

        def find_packed_sequence_indices(position_ids: Tensor) -> Tensor | None:
            return None if _install_state.depth else original(position_ids)

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
    unsupported = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]
    if unsupported:
        got = f"cp > 1 and attention with {' and '.join(unsupported)} ({type(module).__name__})"
        raise TaskError(Problem(got, "plain or causal attention, with a mask of keys", DP_INSTEAD))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    enable_gqa = query.shape[1] != key.shape[1]
    out = sdpa_interception.intercepted_sdpa(
        query, key, value, attention_mask, dropout, causal, scale=scaling, enable_gqa=enable_gqa
    )
    return out.transpose(1, 2).contiguous(), None


def _key_mask(*, mask_function: Any, attention_mask: Tensor | None = None, **_: Any) -> Tensor | None:
    """See transformers' `AttentionMaskInterface`: a key mask, bool [B, 1, 1, l], or None."""
    from transformers.masking_utils import bidirectional_mask_function, causal_mask_function

    if mask_function not in (causal_mask_function, bidirectional_mask_function):
        name = getattr(mask_function, "__qualname__", str(mask_function)).partition(".")[0]
        got = f"cp > 1 and a mask by {name}, made from this rank's tokens alone"
        raise TaskError(Problem(got, "plain or causal attention, with a mask of keys", DP_INSTEAD))
    return None if attention_mask is None else attention_mask[:, None, None, :]
