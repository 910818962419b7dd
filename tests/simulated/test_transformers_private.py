"""Each name of transformers that we use without documentation is there, and does what we rely on.

The models run whole here, in one process, so through our attention they compute what they compute by themselves.
"""

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fourfold.model import sdpa_interception
from fourfold.model.transformers_attention import install_attention
from fourfold.words.errors import TaskError

transformers = pytest.importorskip("transformers")

BATCH, LENGTH, HEADS, HEAD_SIZE = 2, 8, 4, 8
SIZES = {
    "vocab_size": 50,
    "hidden_size": HEADS * HEAD_SIZE,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
}
GROUPED = {"num_key_value_heads": 2, "head_dim": HEAD_SIZE, **SIZES}
SDPA, EAGER = {"attn_implementation": "sdpa"}, {"attn_implementation": "eager"}
FULL = {"layer_types": ["full_attention"], **EAGER}


class Call(NamedTuple):
    """One call of `intercepted_sdpa`."""

    shape: torch.Size
    mask: Tensor | None
    dropout: float
    is_causal: bool
    scale: float | None


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    """What our attention is asked for; it computes in plain torch."""
    seen: list[Call] = []

    def attend(
        query: Tensor, key: Tensor, value: Tensor, mask: Any, dropout: float, causal: bool, **options: Any
    ) -> Any:
        seen.append(Call(query.shape, mask, dropout, causal, options["scale"]))
        full = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool)
        mask = (full.tril() if causal else full) & (True if mask is None else mask)
        return F.scaled_dot_product_attention(query, key, value, mask, dropout, **options)

    monkeypatch.setattr(sdpa_interception, "intercepted_sdpa", attend)
    return seen


def llama() -> Any:
    return transformers.LlamaModel(transformers.LlamaConfig(**GROUPED, **SDPA, attention_dropout=0.25, use_cache=False))


def bert() -> Any:
    return transformers.BertModel(transformers.BertConfig(**SIZES, **SDPA, attention_probs_dropout_prob=0.25))


def run(model: nn.Module, **inputs: Any) -> Tensor:
    torch.manual_seed(0)
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)
    return model(input_ids=tokens, **inputs).last_hidden_state


@pytest.mark.parametrize(("make", "is_causal"), [(llama, True), (bert, False)])
def test_a_model_attends_by_the_function_whose_name_is_in_its_config(calls, make, is_causal):
    key_mask = (torch.arange(LENGTH) < torch.tensor([[LENGTH], [5]])).long()
    model = make().eval()
    expected = run(model, attention_mask=key_mask)
    assert not calls
    with install_attention(model):
        out = run(model, attention_mask=key_mask)
    assert model.config._attn_implementation == model.config._attn_implementation_internal == "sdpa"
    (call,) = calls
    assert (call.shape, call.is_causal, call.dropout) == ((BATCH, HEADS, LENGTH, HEAD_SIZE), is_causal, 0.0)
    assert call.scale == HEAD_SIZE**-0.5
    assert call.mask is not None
    assert torch.equal(call.mask, key_mask[:, None, None, :].bool())
    kept = key_mask.bool()
    torch.testing.assert_close(out[kept], expected[kept])
    with install_attention(model):
        run(model.train())
    assert (calls[1].dropout, calls[1].mask) == (0.25, None)


def test_positions_with_a_gap_are_a_border_of_documents_only_outside(calls):
    from transformers import masking_utils

    model, positions = llama(), torch.tensor([0, 1, 2, 3, 8, 9, 10, 11]).expand(BATCH, LENGTH)
    with install_attention(model):
        assert masking_utils.find_packed_sequence_indices(positions) is None
        run(model, position_ids=positions)
    (call,) = calls
    assert call.mask is None
    indices = masking_utils.find_packed_sequence_indices(positions)
    assert indices is not None
    assert indices[0].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_mask_with_a_part_of_the_models_own_is_another_function(calls):
    from transformers.masking_utils import create_causal_mask

    model = llama()
    given = {"inputs_embeds": torch.zeros(BATCH, LENGTH, 32), "attention_mask": None, "past_key_values": None}
    with install_attention(model):
        assert create_causal_mask(model.config, **given) is None
        with pytest.raises(TaskError, match="a mask by or_masks"):
            create_causal_mask(model.config, **given, or_mask_function=lambda *_: True)


def gemma() -> Any:
    return transformers.Gemma2Model(transformers.Gemma2Config(**GROUPED, **FULL, attn_logit_softcapping=50.0))


def gpt_oss() -> Any:
    return transformers.GptOssModel(transformers.GptOssConfig(**GROUPED, **FULL, num_local_experts=2))


def mistral() -> Any:
    return transformers.MistralModel(transformers.MistralConfig(**GROUPED, **EAGER, sliding_window=4))


@pytest.mark.parametrize(("make", "name"), [(gemma, "softcap"), (gpt_oss, "s_aux"), (mistral, "sliding_window")])
def test_attention_with_more_than_a_mask_of_keys_is_refused_by_the_name_of_the_option(calls, make, name):
    model, mask = make(), torch.ones(BATCH, 1, LENGTH, LENGTH, dtype=torch.bool)
    with install_attention(model), pytest.raises(TaskError, match=f"attention with {name} "):
        run(model, attention_mask=mask)  # a mask of scores is passed on as it is, so the model makes none
    assert not calls


def test_a_model_names_the_tensors_of_older_files_that_it_skips():
    config = transformers.GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=50)
    assert "attn.bias" in transformers.GPT2LMHeadModel(config)._keys_to_ignore_on_load_unexpected
