"""Cases of `bench.same`: plans, models and batches, drawn from a seed. Imports neither torch nor Fourfold.

case   one training: a value for each field of OPTIONS
api    the interface that drives it: "loop" (parallelize), "feed" (parallelize and Feed), "train" (ff.train), "wrap"
       (DistributedOptimizer)
pair   two fields and their values, in one case
run    a run folder: a plan in TOML, and further arguments of `fourfold train`
Law: the same seed gives the same cases. Each case satisfies `is_legal`, so no plan is refused.

Plan fields have their present names here. `NEW_NAMES` has those of later commits, where one renames them.
"""

import random
from collections.abc import Iterable
from typing import Any

Case = dict[str, Any]
Pair = tuple[str, str]

SEED, NUM_CASES, NUM_QUICK = 4, 60, 12
STEPS = 3
NUM_CANDIDATES = 60
WRAP_EVERY = 12
LAYERWISE = ("LAMB", "LARS")
NEW_NAMES: dict[str, str] = {}

# The first option of each field is its default, from which a case is drawn.
TASK_OPTIONS: dict[str, tuple[Any, ...]] = {
    "ranks": (2, 1, 3, 4),
    "api": ("loop", "feed", "train", "wrap"),
    "model": ("mlp", "tied", "spare", "norm", "frozen", "conv", "attention"),
    "dtype": ("float32", "float64"),
    "loss": ("values", "pair", "scalar", "masked"),
    "optimizer": ("AdamW", "SGD", *LAYERWISE),
    "clip": (None, 0.05),
    "batches": ("even", "uneven", "empty"),
    "reload": (False, True),
}
PLAN_OPTIONS: dict[str, tuple[Any, ...]] = {
    "cp": (1, 2, 4),
    "shard": (None, 1, 2),
    "zero": (0, 1, 2, 3),
    "microbatches": (1, 2, 3),
    "ring": ("zigzag", "plain", "rsa", "gather"),
    "ulysses": (1, 2, 4),
    "update": ("after", "in_backward", "in_forward"),
    "sync": ("step", "local"),
    "local_steps": (3, 1),
    "outer_lr": (1.0, 0.7),
    "outer_momentum": (0.0, 0.9),
    "codec": ("none", "bf16", "fp16", "int8", "topk", "powersgd", "dct"),
    "codec_rank": (2, 1),
    "codec_density": (0.2, 0.5),
    "codec_refresh_steps": (2, 1),
    "offload": ("none", "states"),
    "precision": ("keep", "bf16", "fp16"),
    "reduce_dtype": ("keep", "fp32", "bf16"),
    "batch_norm": ("error", "local"),
    "unused": ("error", "allow"),
    "bucket_bytes": (1500, 6000, 4194304),
    "transport": ("gloo", "auto", "shared"),
}
OPTIONS = TASK_OPTIONS | PLAN_OPTIONS
START: Case = {name: options[0] for name, options in OPTIONS.items()}
# DistributedOptimizer reads these fields of a plan, and refuses others.
WRAPPED = ("batch_norm", "unused", "bucket_bytes", "transport")
# Each of these fields has an effect only with these values of another field.
READ_UNDER: dict[str, tuple[str, tuple[str, ...]]] = {
    "local_steps": ("sync", ("local",)),
    "outer_lr": ("sync", ("local",)),
    "outer_momentum": ("sync", ("local",)),
    "codec_rank": ("codec", ("powersgd",)),
    "codec_density": ("codec", ("topk", "dct")),
    "codec_refresh_steps": ("codec", ("dct",)),
}


def data_ranks(case: Case) -> int:
    """The length of the data axis."""
    return case["ranks"] // case["cp"]


def differing(case: Case, names: Iterable[str]) -> list[str]:
    """Those of the fields that differ from START."""
    return [name for name in names if case[name] != START[name]]


def is_legal(case: Case) -> bool:
    """Whether the plan, the interface and the model allow the case."""
    rules = (_mesh, _fields_are_read, _model, _api, _update, _local, _numbers)
    return all(rule(case) for rule in rules)


def _mesh(case: Case) -> bool:
    if case["ranks"] % case["cp"] or case["cp"] % case["ulysses"]:
        return False
    if case["shard"] is not None and (case["zero"] == 0 or data_ranks(case) % case["shard"]):
        return False
    return case["ring"] == "zigzag" or case["cp"] > case["ulysses"]


def _fields_are_read(case: Case) -> bool:
    return all(case[READ_UNDER[name][0]] in READ_UNDER[name][1] for name in differing(case, READ_UNDER))


def _model(case: Case) -> bool:
    if case["cp"] > 1 and case["model"] != "attention":
        return False
    if case["model"] == "spare" and case["unused"] == "error":
        return False
    is_batch_split = case["ranks"] * case["microbatches"] > 1
    return not (case["model"] == "norm" and is_batch_split and case["batch_norm"] == "error")


def _api(case: Case) -> bool:
    if case["batches"] != "even" and (data_ranks(case) == 1 or case["api"] not in ("loop", "wrap")):
        return False
    if case["api"] in ("train", "wrap") and case["reload"]:
        return False
    if case["api"] != "wrap":
        return True
    ignored = [name for name in PLAN_OPTIONS if name not in (*WRAPPED, "microbatches")]
    return not differing(case, ignored) and case["loss"] == "values" and case["batches"] != "empty"


def _update(case: Case) -> bool:
    if case["update"] != "in_backward":
        return True
    if case["clip"] is not None or case["unused"] == "allow" or case["precision"] == "fp16":
        return False
    return not (case["optimizer"] in LAYERWISE and case["zero"] and case["ranks"] > 1)


def _local(case: Case) -> bool:
    needs = ("offload", "precision", "cp", "zero", "codec", "unused")
    return case["sync"] == "step" or (not differing(case, needs) and case["update"] != "in_forward")


def _numbers(case: Case) -> bool:
    if case["precision"] != "keep" and case["dtype"] != "float32":
        return False
    if case["codec"] == "none":
        return True
    if case["zero"] == 3 or case["precision"] == "fp16":
        return False
    return case["unused"] == "error" or case["codec"] in ("bf16", "fp16")


def pairs(case: Case) -> frozenset[Pair]:
    """All pairs of a case, without fields that have no effect."""
    idle = {name for name, (other, values) in READ_UNDER.items() if case[other] not in values}
    if case["cp"] == case["ulysses"]:
        idle.add("ring")
    values = [f"{name}={value}" for name, value in case.items() if name not in idle]
    return frozenset((a, b) for i, a in enumerate(values) for b in values[i + 1 :])


def _candidate(draw: random.Random, fixed: Case) -> Case:
    """A legal case: START, with each field that is not fixed changed to a random option if that is legal."""
    case, names = START | fixed, [name for name in OPTIONS if name not in fixed]
    for _ in range(2):
        for name in draw.sample(names, len(names)):
            changed = case | {name: draw.choice(OPTIONS[name])}
            if is_legal(changed):
                case = changed
    return case


def generate(count: int = NUM_CASES, seed: int = SEED) -> tuple[list[Case], float]:
    """The cases, those with most new pairs first, and the fraction of all pairs seen that they cover."""
    draw = random.Random(seed)
    cases: list[Case] = []
    covered: set[Pair] = set()
    possible: set[Pair] = set()
    for number in range(count):
        # DistributedOptimizer reads few fields, so such a case has few new pairs and would hardly be chosen.
        fixed = {"api": "wrap"} if number % WRAP_EVERY == WRAP_EVERY - 1 else {}
        candidates = [(case, pairs(case)) for case in (_candidate(draw, fixed) for _ in range(NUM_CANDIDATES))]
        possible.update(*(found for _, found in candidates))
        best, new = max(candidates, key=lambda each: len(each[1] - covered))
        cases.append(best)
        covered |= new
    return cases, len(covered) / len(possible)


def plan_fields(case: Case) -> dict[str, Any]:
    """The fields of the case's plan, without those that have no effect."""
    if case["api"] == "wrap":
        return {"dp": case["ranks"], **{name: case[name] for name in WRAPPED}}
    skipped = {name for name, (other, values) in READ_UNDER.items() if case[other] not in values}
    fields = {name: case[name] for name in PLAN_OPTIONS if name not in skipped and case[name] is not None}
    return {"dp": data_ranks(case), **fields}


def describe(case: Case) -> str:
    """The case in a line: the main options, then those that differ from START."""
    always = ("api", "model", "dtype", "optimizer")
    rest = differing(case, [name for name in OPTIONS if name not in (*always, "ranks")])
    head = f"{case['ranks']} ranks, " + ", ".join(str(case[name]) for name in always)
    return "; ".join([head, *(f"{name} = {case[name]}" for name in rest)])


# ---- run folders -----------------------------------------------------------------------------------

RUN_STEPS, SAVED_STEP = 6, 3
RUN_WORDS = (
    "width=16 layers=2 heads=2 length=16 batch_size=4 valid_bytes=256 drift_check=3 trace_every=1 "
    f"data=text.txt steps={RUN_STEPS} checkpoint_every={SAVED_STEP}"
).split()
CODECS = [{"codec": codec, "zero": number % 3} for number, codec in enumerate(PLAN_OPTIONS["codec"][1:])]
EXTRA = {
    "powersgd": {"codec_rank": 2},
    "topk": {"codec_density": 0.2},
    "dct": {"codec_density": 0.2, "codec_refresh_steps": 2},
}
RUNS: tuple[dict[str, Any], ...] = (
    *({"zero": zero} for zero in range(4)),
    *(fields | EXTRA.get(fields["codec"], {}) for fields in CODECS),
    {"sync": "local", "local_steps": 3, "outer_lr": 0.7, "outer_momentum": 0.9},
    {"zero": 2, "precision": "bf16", "reduce_dtype": "fp32", "transport": "gloo"},
)
QUICK_RUNS = (0, 3, 9, 10)


def run_name(fields: dict[str, Any]) -> str:
    """The name of a run's folder, from its plan: `zero-2-codec-int8`."""
    shown = ("zero", "codec", "sync", "precision")
    return "-".join(f"{name}-{fields[name]}" for name in shown if name in fields)


def toml(fields: dict[str, Any]) -> str:
    """A plan for two ranks in the format of version 1."""
    values = {"version": 1, "dp": 2, "bucket_bytes": 6000, **fields}
    return "".join(f'{k} = "{v}"\n' if isinstance(v, str) else f"{k} = {v}\n" for k, v in values.items())
