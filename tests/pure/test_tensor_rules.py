"""Tensor rules: shards tile each parameter, local counts fit local sizes, and each mistake has its message."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fourfold.axes.tensor.rules.layout import tensor_layout
from fourfold.axes.tensor.rules.styles import Count, ModuleSpec, Quotient, Rule, Style, parse_rule, read_rules
from fourfold.words.errors import PlanError

LM_RULES = {
    "embedding": "vocabulary",
    "blocks.*.attention.qkv": "column(heads, kv_heads, kv_heads)",
    "blocks.*.attention.out": "row(heads)",
    "blocks.*.mlp.gate_up": "column(2)",
    "blocks.*.mlp.down": "row",
    "head": "vocabulary",
}


def module(name, kind="other", counts=None, class_name="", **parameters):
    return ModuleSpec(name, kind, parameters, counts or {}, class_name)


def lm(heads=4, kv_heads=2, head_size=8, hidden=24, vocabulary=50):
    """A model of two blocks, with fused queries, keys and values and a fused gated MLP."""
    width = heads * head_size
    modules = [module(""), module("embedding", "embedding", weight=(vocabulary, width)), module("blocks")]
    for name in ("blocks.0", "blocks.1"):
        counts = {"heads": heads, "kv_heads": kv_heads, "head_size": head_size}
        rows = (heads + 2 * kv_heads) * head_size
        modules += [
            module(name, class_name="Block"),
            module(f"{name}.norm", "norm", weight=(width,), class_name="RMSNorm"),
            module(f"{name}.attention", counts=counts, class_name="Attention"),
            module(f"{name}.attention.qkv", "linear", weight=(rows, width), bias=(rows,)),
            module(f"{name}.attention.out", "linear", weight=(width, width), bias=(width,)),
            module(f"{name}.mlp", class_name="MLP"),
            module(f"{name}.mlp.gate_up", "conv1d", weight=(width, 2 * hidden), bias=(2 * hidden,)),
            module(f"{name}.mlp.down", "conv1d", weight=(hidden, width), bias=(width,)),
        ]
    return [*modules, module("head", "linear", weight=(vocabulary, width))]


@st.composite
def split_models(draw):
    """(sizes of an lm, tp) that fit: kv_heads divides tp or is divided by it."""
    tp, groups = draw(st.integers(1, 6)), draw(st.integers(1, 3))
    kv_heads = draw(st.sampled_from([n for n in range(1, 13) if n % tp == 0 or tp % n == 0]))
    heads = math.lcm(kv_heads, tp) * groups
    sizes = {"heads": heads, "kv_heads": kv_heads, "head_size": draw(st.integers(1, 3))}
    return sizes | {"hidden": tp * draw(st.integers(1, 3)), "vocabulary": draw(st.integers(tp * tp, 40))}, tp


@given(split_models())
def test_each_element_of_each_parameter_is_counted_by_one_place(model):
    sizes, tp = model
    layout = tensor_layout(lm(**sizes), {}, LM_RULES, tp)
    for name, shards in layout.shards.items():
        assert len(shards) == tp
        held = {}
        for index, shard in enumerate(shards):
            assert shard.shape == shards[0].shape
            assert shard.dim == shards[0].dim
            for piece in shard.pieces:
                for row in range(piece.start, piece.stop):
                    held.setdefault(row, []).append((piece.replica, piece.num_replicas, index))
        length = shards[0].shape[shards[0].dim]
        assert sorted(held) == list(range(length)), name
        for places in held.values():  # replicas 0, 1, 2 … of neighbouring places
            replicas, totals, indices = zip(*places, strict=True)
            assert replicas == tuple(range(len(places)))
            assert set(totals) == {len(places)}
            assert indices == tuple(range(indices[0], indices[0] + len(places)))


@given(split_models())
def test_local_counts_times_sizes_are_the_local_widths(model):
    sizes, tp = model
    layout = tensor_layout(lm(**sizes), {}, LM_RULES, tp)
    local = layout.counts["blocks.1.attention"]
    assert set(local) == {"heads", "kv_heads"}
    size, hidden = sizes["head_size"], sizes["hidden"] // tp
    width, rows = sizes["heads"] * size, (local["heads"] + 2 * local["kv_heads"]) * size
    expected = {
        "attention.qkv.weight": (rows, width),
        "attention.qkv.bias": (rows,),
        "attention.out.weight": (width, local["heads"] * size),
        "attention.out.bias": (width,),
        "mlp.gate_up.weight": (width, 2 * hidden),
        "mlp.gate_up.bias": (2 * hidden,),
        "mlp.down.weight": (hidden, width),
        "mlp.down.bias": (width,),
        "norm.weight": (width,),
    }
    for index in range(tp):
        shapes = {name: layout.shards[f"blocks.1.{name}"][index].local_shape for name in expected}
        assert shapes == expected


@given(split_models())
def test_the_queries_of_a_place_attend_to_the_keys_that_it_holds(model):
    sizes, tp = model
    layout = tensor_layout(lm(**sizes), {}, LM_RULES, tp)
    heads, kv_heads, size = sizes["heads"], sizes["kv_heads"], sizes["head_size"]
    for shard in layout.shards["blocks.0.attention.qkv.weight"]:
        rows = [row for piece in shard.pieces for row in range(piece.start, piece.stop)]
        queries = [row // size for row in rows if row < heads * size]
        keys, values = (
            [row // size - first for row in rows if first <= row // size < first + kv_heads]
            for first in (heads, heads + kv_heads)
        )
        local = layout.counts["blocks.0.attention"]
        assert len(queries) == local["heads"] * size
        assert keys == values
        # As attention on the place pairs them: query head h uses key head h // (local heads / local kv heads).
        repeated = [key for key in keys[::size] for _ in range(local["heads"] // local["kv_heads"])]
        assert repeated == [head // (heads // kv_heads) for head in queries[::size]]


def test_a_gated_mlp_gets_the_same_columns_of_both_of_its_halves():
    shards = tensor_layout(lm(hidden=4), {}, LM_RULES, 2).shards["blocks.0.mlp.gate_up.weight"]
    assert [[(piece.start, piece.stop) for piece in shard.pieces] for shard in shards] == [
        [(0, 2), (4, 6)],
        [(2, 4), (6, 8)],
    ]


def test_what_no_rule_splits_is_whole_and_counted_once():
    layout = tensor_layout(lm(), {}, LM_RULES, 2)
    for name in ("blocks.0.norm.weight", "blocks.0.attention.out.bias"):
        assert [shard.is_whole for shard in layout.shards[name]] == [True, True]
        assert [bool(shard.uncounted_ranges) for shard in layout.shards[name]] == [False, True]
    assert layout.styles["blocks.0.attention.out"] is Style.ROW
    assert "blocks.0.norm" not in layout.styles
    assert set(layout.shards) == {f"{m.name}.{key}" for m in lm() for key in m.parameters}


def test_at_tp_1_everything_is_whole():
    layout = tensor_layout(lm(), {}, LM_RULES, 1)
    assert all(shard.is_whole for shards in layout.shards.values() for shard in shards)
    assert layout.counts["blocks.0.attention"] == {"heads": 4, "kv_heads": 2}


def test_a_replicated_norm_is_whole_and_has_its_style():
    layout = tensor_layout(lm(), {}, LM_RULES | {"blocks.*.norm": "replicated"}, 2)
    assert layout.styles["blocks.1.norm"] is Style.REPLICATED
    assert layout.shards["blocks.1.norm.weight"][1].is_whole


def test_a_tied_weight_has_the_same_shards_under_both_names():
    layout = tensor_layout(lm(vocabulary=7), {"head.weight": "embedding.weight"}, LM_RULES, 2)
    assert layout.shards["head.weight"] == layout.shards["embedding.weight"]
    assert [shard.local_shape[0] for shard in layout.shards["head.weight"]] == [4, 3]


def test_a_second_name_in_the_container_of_a_split_layer_is_split_with_it():
    modules = [
        module(""),
        module("head", bias=(6,)),
        module("head.decoder", "linear", weight=(6, 4), bias=(6,)),
    ]
    layout = tensor_layout(modules, {"head.decoder.bias": "head.bias"}, {"head.decoder": "vocabulary"}, 2)
    assert layout.shards["head.bias"] == layout.shards["head.decoder.bias"]
    assert [shard.local_shape for shard in layout.shards["head.bias"]] == [(3,), (3,)]


def test_a_parameter_of_a_module_with_two_names_has_its_shards_under_both():
    modules = [module(""), module("first", "linear", weight=(4, 4))]
    layout = tensor_layout(modules, {"second.weight": "first.weight"}, {"first": "column"}, 2)
    assert layout.shards["second.weight"] == layout.shards["first.weight"]


# ---- counts -----------------------------------------------------------------------------------------


def attention(heads, kv_heads, counts=None):
    """Attention with separate layers, of heads of 2 elements."""
    modules = [module(""), module("attention", counts=counts, class_name="Attention")]
    for name, rows in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
        modules.append(module(f"attention.{name}", "linear", weight=(2 * rows, 6)))
    return [*modules, module("attention.o", "linear", weight=(6, 2 * heads))]


def given_rules(heads, kv_heads, more=""):
    kv = f"column(kv_heads={kv_heads}{more})"
    return {
        "attention.q": f"column(heads={heads})",
        "attention.k": kv,
        "attention.v": kv,
        "attention.o": f"row(heads={heads})",
    }


def test_counts_may_be_numbers_where_no_module_has_them():
    layout = tensor_layout(attention(8, 2), {}, given_rules(8, 2), 4)
    assert layout.counts == {}
    assert [shard.pieces[0][:] for shard in layout.shards["attention.k.weight"]] == [
        (0, 2, 0, 2),
        (0, 2, 1, 2),
        (2, 4, 0, 2),
        (2, 4, 1, 2),
    ]


def test_a_count_that_the_container_has_gets_its_local_value_in_either_form():
    for rules in (given_rules(8, 2), {name: rule.partition("=")[0] + ")" for name, rule in given_rules(8, 2).items()}):
        layout = tensor_layout(attention(8, 2, {"heads": 8, "kv_heads": 2}), {}, rules, 4)
        assert layout.counts == {"attention": {"heads": 2, "kv_heads": 1}}


def test_groups_of_transformers_follow_the_local_counts():
    modules = attention(8, 2, {"num_key_value_groups": 4})
    assert tensor_layout(modules, {}, given_rules(8, 2), 2).counts == {}
    assert tensor_layout(modules, {}, given_rules(8, 2), 4).counts == {"attention": {"num_key_value_groups": 2}}


def test_quotients_and_shares_are_local_too():
    modules = attention(8, 2, {"repeats": 4, "split_size": 12})
    rules = given_rules(8, 2, "; repeats=heads/kv_heads, split_size")
    assert tensor_layout(modules, {}, rules, 4).counts == {"attention": {"repeats": 2, "split_size": 3}}


def test_a_count_is_that_of_the_nearest_module_that_has_it():
    modules = [
        module("", counts={"heads": 3}),
        module("outer", counts={"heads": 4}),
        module("outer.inner"),
        module("outer.inner.q", "linear", weight=(8, 2)),
    ]
    assert tensor_layout(modules, {}, {"*.inner.q": "column(heads)"}, 2).counts == {"outer": {"heads": 2}}


# ---- rules as text ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("column", Rule(Style.COLUMN)),
        (" row ( heads ) ", Rule(Style.ROW, (Count("heads"),))),
        ("column(2)", Rule(Style.COLUMN, num_parts=2)),
        ("column(h, g=2,g=2)", Rule(Style.COLUMN, (Count("h"), Count("g", 2), Count("g", 2)))),
        ("column(h; a, b=h/g)", Rule(Style.COLUMN, (Count("h"),), shares=("a",), quotients=(Quotient("b", "h", "g"),))),
        ("vocabulary", Rule(Style.VOCABULARY)),
        ("replicated", Rule(Style.REPLICATED)),
        ("channels", Rule(Style.CHANNELS)),
    ],
)
def test_rules_are_read(text, rule):
    assert parse_rule(text) == rule


@pytest.mark.parametrize(
    ("text", "got", "attempt"),
    [
        ("colunm", 'the style "colunm"', '"column"'),
        ("colwise", 'the style "colwise"', '"column"'),
        ("vocabulary(2)", 'the rule "vocabulary(2)"', '"vocabulary"'),
        ("column()", 'the rule "column()"', "(heads=8)"),
        ("column(0)", 'the rule "column(0)"', "(heads=8)"),
        (f"column({'9' * 5000})", f'the rule "column({"9" * 5000})"', "(heads=8)"),
        (f"column(heads={'9' * 5000})", f'the rule "column(heads={"9" * 5000})"', "(heads=8)"),
        ("column(heads=0)", 'the rule "column(heads=0)"', "(heads=8)"),
        ("column(2, heads)", 'the rule "column(2, heads)"', "(heads=8)"),
        ("row(heads;)", 'the rule "row(heads;)"', '"row(heads=8)"'),
        ("column(heads; a=b)", 'the rule "column(heads; a=b)"', "after a semicolon"),
        ("column(heads", "the rule 'column(heads'", ""),
        (3, "the rule 3", ""),
    ],
)
def test_texts_that_are_no_rules_are_refused(text, got, attempt):
    with pytest.raises(PlanError) as caught:
        parse_rule(text)
    (problem,) = caught.value.problems
    assert problem.got == got
    assert problem.need
    assert attempt in problem.attempt


def test_a_file_of_rules_is_read():
    text = '\ufeff# of a model\n"blocks.*.mlp.up" = "column"\nhead = "vocabulary"\n'
    assert read_rules(text) == {"blocks.*.mlp.up": "column", "head": "vocabulary"}


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", [("no rules", "patterns of module names, each with a rule", '"blocks.*.mlp.up" = "column"')]),
        (
            'blocks.0.up = "row"\n"head" = 2\nnorm = "colunm"',
            [
                ("a table, blocks", "no tables; a pattern with dots in quotes", '"blocks.0.up" = "column"'),
                ('"head" = 2', "a rule as text", '"head" = "column"'),
                ('"norm": the style "colunm"', "a style: column, row, vocabulary, channels or replicated", '"column"'),
            ],
        ),
    ],
)
def test_all_that_is_wrong_in_a_file_of_rules_is_named(text, problems):
    with pytest.raises(PlanError) as caught:
        read_rules(text, where="rules.toml")
    assert [tuple(problem) for problem in caught.value.problems] == problems
    assert caught.value.where == "rules.toml"


def test_a_pattern_without_quotes_gets_the_line_and_an_example():
    with pytest.raises(PlanError) as caught:
        read_rules("head = 'row'\nblocks.*.up = 'row'", where="rules.toml")
    (problem,) = caught.value.problems
    assert "line 2" in problem.got
    assert problem[1:] == ("TOML, one rule a line, its pattern in quotes", '"blocks.*.mlp.up" = "column"')


# ---- problems ---------------------------------------------------------------------------------------


def problems_of(modules, rules, tp, tied=None):
    with pytest.raises(PlanError) as caught:
        tensor_layout(modules, tied or {}, rules, tp)
    assert caught.value.where == "the tensor rules"
    return [tuple(problem) for problem in caught.value.problems]


def test_sizes_that_tp_does_not_divide_are_named_with_those_that_work():
    sizes = {"heads": 12, "kv_heads": 4, "hidden": 36, "vocabulary": 3}
    assert problems_of(lm(**sizes), LM_RULES, 5) == [
        ('"embedding" has 3 rows, tp = 5', "rows for each place", "tp = 2"),
        ("heads = 12, tp = 5", "heads divisible by tp", "tp = 2"),
        ("kv_heads = 4, tp = 5", "kv_heads divisible by tp, or tp divisible by kv_heads", "tp = 2"),
        ('"blocks.*.mlp.gate_up" has 2 parts of 36 outputs, tp = 5', "parts divisible by tp", "tp = 2"),
        ('"blocks.*.mlp.down" has 36 inputs, tp = 5', "inputs divisible by tp", "tp = 2"),
        ('"head" has 3 rows, tp = 5', "rows for each place", "tp = 2"),
    ]


def test_sizes_that_work_for_one_rule_only_are_named_as_such():
    found = problems_of(lm(heads=5, kv_heads=5, hidden=9), LM_RULES, 2)
    assert [attempt.partition(",")[0] for _, _, attempt in found] == [
        "tp = 5 (not for all rules)",
        "tp = 5 (not for all rules)",
        "tp = 3 or 9 (not for all rules)",
        "tp = 3 or 9 (not for all rules)",
    ]


def test_no_place_is_left_without_rows_of_the_vocabulary():
    # 5 rows of 4 places would be 2, 2, 1 and none.
    (problem,) = problems_of(lm(vocabulary=5, kv_heads=4), {"head": "vocabulary"}, 4)
    assert problem == ('"head" has 5 rows, tp = 4', "rows for each place", "tp = 2, 3 or 5")


def test_only_what_another_count_exceeds_is_replicated():
    assert problems_of(lm(heads=2, kv_heads=2), LM_RULES, 4)[0][:2] == ("heads = 2, tp = 4", "heads divisible by tp")
    separate = given_rules(2, 1) | {"attention.o": "row"}
    assert problems_of(attention(2, 1), separate, 4)[0][:2] == ("heads = 2, tp = 4", "heads divisible by tp")
    row = {"attention.q": "column(heads=8)", "attention.o": "row(kv_heads=2)"}
    assert problems_of(attention(8, 2), row, 4) == [
        ("kv_heads = 2, tp = 4", "kv_heads divisible by tp", "tp = 2"),
    ]


def test_a_count_may_be_exceeded_by_one_of_another_module_or_in_the_same_one():
    nested = [
        module("", counts={"heads": 4}),
        module("attention", counts={"kv_heads": 2}),
        module("attention.q", "linear", weight=(8, 8)),
        module("attention.k", "linear", weight=(4, 8)),
    ]
    rules = {"attention.q": "column(heads)", "attention.k": "column(kv_heads)"}
    assert tensor_layout(nested, {}, rules, 4).counts == {"": {"heads": 1}, "attention": {"kv_heads": 1}}
    apart = [
        module("", counts={"heads": 4, "kv_heads": 2}),
        module("queries"),
        module("queries.q", "linear", weight=(8, 8)),
        module("keys"),
        module("keys.k", "linear", weight=(4, 8)),
    ]
    rules = {"queries.q": "column(heads)", "keys.k": "column(kv_heads)"}
    assert tensor_layout(apart, {}, rules, 4).counts == {"": {"heads": 1, "kv_heads": 1}}


def test_a_share_is_divided_by_tp():
    rules = {"attention.q": "column(heads=4; split_size)"}
    assert problems_of(attention(4, 4, {"split_size": 6}), rules, 4) == [
        ("split_size = 6, tp = 4", "split_size divisible by tp", "tp = 2"),
    ]


STRUCTURE = [
    # rules, got, need, attempt
    (
        {"blocks.*.mpl.down": "row"},
        '"blocks.*.mpl.down" matches no module',
        "a pattern of module names; * is one name between dots",
        '"blocks.*.mlp.down"',
    ),
    (
        {"*.mlp.down": "row"},
        '"*.mlp.down" matches no module',
        "a pattern of module names; * is one name between dots",
        '"blocks.*.mlp.down"',
    ),
    (
        {"blocks.0.mlp.down": "row", "blocks.*.mlp.down": "row"},
        '"blocks.0.mlp.down" and "blocks.*.mlp.down" match the same layer blocks.*.mlp.down',
        "one rule for each layer",
        "leave one of them out, or make it narrower",
    ),
    (
        {"blocks.*.norm": "column"},
        '"blocks.*.norm" = "column" matches modules of class RMSNorm',
        "Linear, Conv1D, convolution or transposed convolution",
        'no rule: it stays whole; "replicated" for a norm of split heads',
    ),
    (
        {"blocks.*.mlp": "column"},
        '"blocks.*.mlp" = "column" matches modules of class MLP',
        "Linear, Conv1D, convolution or transposed convolution",
        '"blocks.*.mlp.gate_up", "blocks.*.mlp.down"',
    ),
    (
        {"blocks.*.mlp": "replicated"},
        '"blocks.*.mlp" = "replicated" matches modules of class MLP',
        "a module with parameters of its own",
        '"blocks.*.mlp.gate_up", "blocks.*.mlp.down"',
    ),
    (
        {"embedding": "row"},
        '"embedding" = "row" matches modules of class embedding',
        "Linear, Conv1D, convolution or transposed convolution",
        '"vocabulary"',
    ),
    (
        {"blocks.*.mlp.down": "vocabulary"},
        '"blocks.*.mlp.down" = "vocabulary" matches modules of class conv1d',
        "Embedding or Linear",
        '"column" or "row"',
    ),
    (
        {"blocks.*.attention.out": "row(head)"},
        '"head" for "blocks.*.attention.out" is not an attribute of the Attention around it',
        "a whole number, of it or of a module around it",
        '"heads"',
    ),
    (
        {"blocks.*.attention.out": "row(channels)"},
        '"channels" for "blocks.*.attention.out" is not an attribute of the Attention around it',
        "a whole number, of it or of a module around it",
        "channels=8 if there are 8 of them",
    ),
    (
        {"blocks.*.attention.out": "row(heads; channels)"},
        '"channels" for "blocks.*.attention.out" is not an attribute of the Attention around it',
        "a whole number, of it or of a module around it",
        "",
    ),
    (
        {"blocks.*.attention.out": "row(heads=3)"},
        'heads=3 for "blocks.*.attention.out", but blocks.*.attention.heads is 4',
        "the same number, or the name alone",
        "heads",
    ),
    (
        {"blocks.*.mlp.gate_up": "column(parts=5)"},
        '"blocks.*.mlp.gate_up" has 48 outputs, parts = 5',
        "outputs divisible by the sum of the counts",
        "one count for each fused part, in their order",
    ),
    (
        {"blocks.*.mlp.gate_up": "column(5)"},
        '"blocks.*.mlp.gate_up" has 48 outputs',
        "outputs divisible by 5, the number of parts",
        '"column" if it is one part',
    ),
    (
        {"head": "vocab"},
        '"head": the style "vocab"',
        "a style: column, row, vocabulary, channels or replicated",
        '"vocabulary"',
    ),
    (
        {},
        "tp = 2, and no rule splits a layer",
        "rules for the layers to split",
        'tensor={"*.mlp.up": "column", "*.mlp.down": "row"}, or tensor=FILE.toml on the command line',
    ),
    (
        {"blocks.*.norm": "replicated"},
        "tp = 2, and no rule splits a layer",
        "rules for the layers to split",
        'tensor={"*.mlp.up": "column", "*.mlp.down": "row"}, or tensor=FILE.toml on the command line',
    ),
    (
        {"blocks.*.attention.out": "row(heads; head_size=heads/kv_heads)"},
        "head_size=heads/kv_heads, and no count kv_heads",
        "a count of a layer in the same module: heads",
        "",
    ),
    (
        {"blocks.*.attention.qkv": "column(heads, kv_heads, kv_heads; head_size=heads/kv_heads)"},
        "head_size=heads/kv_heads, but it is 8, of 4 and 2",
        "the quotient of the two counts",
        "",
    ),
    (
        {"blocks.*.attention.qkv": "column(h=4, g=2, g=2)", "blocks.*.attention.out": "row(h=2)"},
        "h = 2 and 4 in blocks.*.attention",
        "one number for each name",
        "another name for one of them",
    ),
]


@pytest.mark.parametrize(("rules", "got", "need", "attempt"), STRUCTURE, ids=lambda value: str(value)[:40])
def test_a_rule_that_does_not_fit_the_model_is_refused(rules, got, need, attempt):
    assert problems_of(lm(), rules, 2) == [(got, need, attempt)]


def test_all_problems_are_named_at_once():
    rules = LM_RULES | {"blocks.*.attention.out": "row(head)", "nothing": "row", "blocks.*.norm": "colum"}
    found = problems_of(lm(hidden=3), rules, 2, {"head.weight": "embedding.weight"})
    assert [problem[0].partition(" ")[0] for problem in found] == [
        '"blocks.*.norm":',
        '"nothing"',
        '"head"',
        '"blocks.*.mlp.gate_up"',
        '"blocks.*.mlp.down"',
    ]


def test_a_problem_hides_no_other_and_makes_none():
    # Without the queries' rule, one head of keys and values seems to be all that there is; it may still be replicated.
    rules = given_rules(4, 1) | {"attention.q": "column(head)", "attention.o": "row(head)"}
    assert [problem[0][:6] for problem in problems_of(attention(4, 1), rules, 4)] == ['"head"', '"head"']


@pytest.mark.parametrize("name", ["attention", "attention.out_proj"])
def test_multihead_attention_is_refused_by_name_and_so_are_its_layers(name):
    modules = [
        module("", counts={"heads": 2}),
        module("attention", "attention", in_proj_weight=(12, 4), in_proj_bias=(12,), class_name="MultiheadAttention"),
        module("attention.out_proj", "linear", weight=(4, 4), bias=(4,)),
    ]
    assert problems_of(modules, {name: "row"}, 2) == [
        (
            f'"{name}" is in the nn.MultiheadAttention attention',
            "separate linear layers: nn.MultiheadAttention is not split yet",
            "no rule for it: it stays whole",
        )
    ]


def channel_layers(groups: int = 1) -> list[ModuleSpec]:
    conv = {"in_channels": 8, "out_channels": 16}
    return [
        module(""),
        module("down", "convolution", weight=(16, 8, 3), bias=(16,), counts={**conv, "groups": 1}, class_name="Conv1d"),
        module("norm", "group_norm", weight=(16,), bias=(16,), counts={"num_groups": 4, "num_channels": 16}),
        module("each", "convolution", weight=(16, 16 // groups, 3), counts={"groups": groups}, class_name="Conv1d"),
        module(
            "up", "transposed_convolution", weight=(16, 8, 3), bias=(8,),
            counts={"in_channels": 16, "out_channels": 8, "groups": 1},
        ),
    ]  # fmt: skip


def test_channels_are_split_by_whole_groups():
    modules = channel_layers(groups=16)
    rules = {"down": "column", "norm": "channels", "each": "channels", "up": "row"}
    modules[3] = modules[3]._replace(counts={"groups": 16, "in_channels": 16, "out_channels": 16})
    layout = tensor_layout(modules, {}, rules, 2)
    held = {
        name: (shards[1].dim, shards[1].local_shape, shards[1].pieces[0].start)
        for name, shards in layout.shards.items()
    }
    assert held == {
        "down.weight": (0, (8, 8, 3), 8),
        "down.bias": (0, (8,), 8),
        "norm.weight": (0, (8,), 8),
        "norm.bias": (0, (8,), 8),
        "each.weight": (0, (8, 1, 3), 8),
        "up.weight": (0, (8, 8, 3), 8),
        "up.bias": (0, (8,), 0),
    }
    assert layout.counts == {
        "down": {"out_channels": 8},
        "norm": {"num_groups": 2, "num_channels": 8},
        "each": {"groups": 8, "in_channels": 8, "out_channels": 8},
        "up": {"in_channels": 8},
    }


@pytest.mark.parametrize(
    ("rules", "groups", "tp", "got", "need", "attempt"),
    [
        ({"norm": "channels"}, 1, 8, '"norm" has 4 groups of channels, tp = 8', "groups divisible by tp",
         "tp = 2 or 4"),
        ({"norm": "column"}, 1, 2, '"norm" = "column" matches modules of class group_norm',
         "Linear, Conv1D, convolution or transposed convolution", '"channels"'),
        ({"each": "column"}, 4, 2, '"each" = "column" matches modules of class Conv1d with groups = 4',
         "groups = 1, which mixes all channels", '"channels"'),
        ({"down": "channels"}, 1, 2, '"down" = "channels" matches modules of class Conv1d with groups = 1',
         "several groups of channels", '"column" or "row"'),
        ({"down": "column"}, 1, 3, '"down" has 16 output channels, tp = 3', "output channels divisible by tp",
         "tp = 2, 4, 8 or 16"),
    ],
)  # fmt: skip
def test_channels_that_cannot_be_split_are_named(rules, groups, tp, got, need, attempt):
    assert problems_of(channel_layers(groups), rules, tp) == [(got, need, attempt)]


@pytest.mark.parametrize("parameters", [{"weight_g": (4, 1), "weight_v": (4, 4)}, {"weight": (4, 4), "scale": (4,)}])
def test_a_layer_with_parameters_that_its_kind_does_not_have_is_refused(parameters):
    modules = [module(""), module("layer", "linear", class_name="Linear", **parameters)]
    assert problems_of(modules, {"layer": "column"}, 2) == [
        (
            f'"layer" = "column" matches modules of class Linear with the parameters {", ".join(parameters)}',
            "its own weight, and a bias or none",
            "no rule for it: it stays whole",
        )
    ]


def test_a_count_of_none_is_refused():
    rules = {"attention.q": "column(heads)"}
    assert problems_of(attention(4, 4, {"heads": 0}), rules, 2) == [("heads = 0", "1 or more to be split", "")]


@pytest.mark.parametrize(
    ("rules", "said"),
    [
        ({"embedding": "vocabulary"}, 'embedding is "vocabulary", head has no rule'),
        ({"head": "vocabulary"}, 'embedding has no rule, head is "vocabulary"'),
        ({"embedding": "vocabulary", "head": "row"}, 'embedding is "vocabulary", head is "row"'),
    ],
)
def test_a_tied_weight_split_in_two_ways_is_refused(rules, said):
    assert problems_of(lm(), rules, 2, {"head.weight": "embedding.weight"}) == [
        (
            f"embedding.weight and head.weight are one parameter; {said}",
            "the same split under both names",
            '"vocabulary" for both, or no rule for both',
        )
    ]


def test_replicated_heads_beside_groups_that_fit_no_counts_are_refused():
    (problem,) = problems_of(attention(8, 2, {"num_key_value_groups": 3}), given_rules(8, 2), 4)
    assert problem == (
        "num_key_value_groups = 3 of Attention, and the counts heads, kv_heads",
        "to know which counts it is the quotient of",
        '"column(kv_heads; num_key_value_groups=heads/kv_heads)"',
    )
