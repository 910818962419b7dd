"""`fourfold show` of the tensor axis: the layers that are split, what a rank holds, and what they send."""

from fourfold.analysis.describe import show
from fourfold.plan.plan import Plan
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


def test_show_prints_the_layers_that_are_split():
    task = lm.task(width=16, layers=2, heads=4, kv_heads=2, length=16)
    text = show(Plan(tp=2), task)
    assert EXPECTED in text, text
    assert "tensor   " not in show(Plan(dp=2), task)
