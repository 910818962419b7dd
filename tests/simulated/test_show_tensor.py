"""`fourfold show` of the tensor axis: the layers that are split, what a rank holds, and what they send."""

from fourfold.plan.plan import Plan
from fourfold.show.describe import show
from fourfold.tasks import lm

EXPECTED = """
tensor   layers that are split; all others are whole on every rank
  a rank holds 8,016 of 15,952 elements
  layer                        style       weight    on a rank  in forward           in backward
  embedding                    vocabulary  256 × 16  128 × 16   all-reduce           –
  blocks.*.attention.qkv  × 2  column      32 × 16   16 × 16    –                    all-reduce
  blocks.*.attention.out  × 2  row         16 × 16   16 × 8     all-reduce           –
  blocks.*.mlp.gate_up    × 2  column      128 × 16  64 × 16    –                    all-reduce
  blocks.*.mlp.down       × 2  row         16 × 64   16 × 32    all-reduce           –
  head                         vocabulary  256 × 16  128 × 16   depends on the loss  all-reduce

  loss of                 in forward                kept of a target's logits
  head     cross entropy  3 numbers per target      128 of 256
  head     any other      all-gather of the logits  what it needs of 256
"""


# 10 · 16 · 1/2 elements of four bytes for each token, instead of 8 · 16 · 1/2; the gradients of two norms.
EXPECTED_WITH_SPLIT_RESIDUALS = """
  layer                        style       weight    on a rank  in forward           in backward
  embedding                    vocabulary  256 × 16  128 × 16   all-reduce           –
  blocks.*.attention.qkv  × 2  column      32 × 16   16 × 16    all-gather           all-gather, reduce-scatter
  blocks.*.attention.out  × 2  row         16 × 16   16 × 8     reduce-scatter       all-gather
  blocks.*.mlp.gate_up    × 2  column      128 × 16  64 × 16    all-gather           all-gather, reduce-scatter
  blocks.*.mlp.down       × 2  row         16 × 64   16 × 32    reduce-scatter       all-gather
  head                         vocabulary  256 × 16  128 × 16   depends on the loss  reduce-scatter or all-reduce

  loss of                 in forward                kept of a target's logits
  head     cross entropy  3 numbers per target      128 of 256
  head     any other      all-gather of the logits  what it needs of 256

sequence parallelism   what a rank sends for a block, in forward and backward
  tokens are split from the entry of blocks.0 to the end of norm; there they are gathered
  blocks         per token  without it  of weights, per backward
  blocks.*  × 2      320 B       256 B                     128 B
"""


def test_show_prints_the_layers_that_are_split():
    task = lm.task(width=16, layers=2, heads=4, kv_heads=2, length=16)
    text = show(Plan(tp=2), task)
    assert EXPECTED in text, text
    assert "sequence parallelism   " not in text
    assert "tensor   " not in show(Plan(dp=2), task)
    text = show(Plan(tp=2, sequence_parallel=True), task)
    assert EXPECTED_WITH_SPLIT_RESIDUALS in text, text
