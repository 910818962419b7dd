"""The planner against published tables: steps on thousands of devices, predicted from descriptions of clusters.

Megatron      tables 1 and 2 of Narayanan et al. (arXiv 2104.04473). Eight constants of `clusters/dgx-a100.toml` are
              fitted on six rows; the others are held out. Microbatch and interleaving that the paper does not give are
              the best ones that fit in memory
GPipe         table 2 of Huang et al. (arXiv 1811.06965), Transformer-48
zero bubble   throughputs of Qi et al. (arXiv 2401.10241)
ImageNet      the ladder of ResNet-50 in minutes

Law: a step is that of the program which Fourfold would run, simulated; nothing here trains or measures.

    python -m bench.published [--only megatron gpipe zero-bubble imagenet] [--fit]
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from statistics import mean

from bench import published_imagenet, published_megatron
from bench.measurement import describe_machine
from bench.published_megatron import CLUSTER, PRIORS, ROWS, Row
from bench.published_pipelines import GPIPE_BATCH, Ratio, gpipe_ratios, zero_bubble_ratios
from fourfold.plan.plan import Plan
from fourfold.planner.predict.clusters import load_cluster, read_table
from fourfold.words.terminal_text import align_columns

MEAN_LIMIT, ROW_LIMIT, RATIO_LIMIT, RUNG_LIMIT = 0.05, 0.10, 0.10, 0.25


def verdict(error: float, limit: float) -> str:
    return f"within {limit:.0%}" if abs(error) <= limit else "missed"


def print_table(rows: Sequence[Sequence[str]], alignments: str) -> None:
    for line in align_columns(rows, alignments):
        print(f"  {line}")
    print()


# ---- Megatron --------------------------------------------------------------------------------------


def print_megatron() -> None:
    """Errors row by row, those of fitted rows and of held-out ones apart."""
    cluster = load_cluster(CLUSTER)
    titles = ("model", "GPUs", "tp", "pp", "dp", "microbatch", "interleave", "s", "published", "TFLOP/s", "published")
    rows: list[tuple[str, ...]] = [(*titles, "error", "", "")]
    errors: dict[bool, list[float]] = {True: [], False: []}
    for row in ROWS:
        plan = published_megatron.best_plan(row, cluster.resized(row.gpus))
        seconds = published_megatron.predicted_seconds(row, plan, cluster)
        error = row.published_seconds / seconds - 1
        errors[row.is_fitted].append(error)
        fitted = "fitted" if row.is_fitted else "held out"
        rows.append((*_megatron_cells(row, plan, seconds), f"{error:+.1%}", fitted, verdict(error, ROW_LIMIT)))
    print(f"Megatron, tables 1 and 2, on {cluster.name} (~: not given; the fastest that fits)")
    print_table(rows, "<>>>>>>>>>>><<")
    for is_fitted, name in ((True, "fitted"), (False, "held out")):
        sizes = [abs(each) for each in errors[is_fitted]]
        print(f"  {name}: mean {mean(sizes):.1%} ({verdict(mean(sizes), MEAN_LIMIT)}), largest {max(sizes):.1%}")
    print()


def _megatron_cells(row: Row, plan: Plan, seconds: float) -> tuple[str, ...]:
    microbatch = row.batch_size // (row.dp * plan.microbatches)
    teraflops = row.teraflops * row.published_seconds / seconds
    sizes = tuple(map(str, (row.gpus, row.tp, row.pp, row.dp)))
    unknown = f"{'' if row.microbatch else '~'}{microbatch}", f"~{plan.interleave}" if row.pp > 1 else "1"
    times = f"{seconds:.2f}", f"{row.published_seconds:.2f}"
    return (row.label, *sizes, *unknown, *times, f"{teraflops:.0f}", f"{row.teraflops:.0f}")


def print_fit() -> None:
    """The constants as the fit finds them, beside those of the description."""
    found, table = published_megatron.fit(), read_table(CLUSTER)
    rows = [("constant", "begins at", "fitted", "in the description")]
    for name, value in found.items():
        place, _, key = name.rpartition(".")
        rows.append((name, f"{PRIORS[name][0]:.3g}", f"{value:.3g}", str((table[place] if place else table)[key])))
    print(f"Constants of {CLUSTER}, fitted on {sum(row.is_fitted for row in ROWS)} rows")
    print_table(rows, "<>>>")


# ---- pipelines -------------------------------------------------------------------------------------


def print_ratios(title: str, ratios: Sequence[Ratio]) -> None:
    rows = [("", "published", "predicted", "error", "")]
    for each in ratios:
        note = verdict(each.error, RATIO_LIMIT) if each.is_asked else "no limit"
        rows.append((each.label, f"{each.published:.2f}", f"{each.predicted:.2f}", f"{each.error:+.1%}", note))
    print(title)
    print_table(rows, "<>>><")


def print_gpipe() -> None:
    print_ratios(
        f"GPipe, table 2, Transformer-48: throughput relative to K = 2, M = 1 (batch {GPIPE_BATCH}: not given)",
        gpipe_ratios(),
    )


def print_zero_bubble() -> None:
    print_ratios("Zero bubble: throughput relative to 1F1B", zero_bubble_ratios())


# ---- ImageNet --------------------------------------------------------------------------------------


def print_imagenet() -> None:
    titles = (
        "run",
        "batch",
        "devices",
        "plan",
        "optimizer and learning rate",
        "step",
        "minutes",
        "published",
        "error",
        "",
    )
    rows: list[tuple[str, ...]] = [titles]
    for rung in published_imagenet.LADDER:
        outcome = published_imagenet.predict(rung)
        plan = " ".join(f"{name}={value}" for name, value in (("dp", rung.devices), *rung.plan))
        rule = published_imagenet.recipe_of(rung).describe(rung.batch_size)
        if outcome is None:
            cells = ("", "", f"{rung.minutes:.3g}", "", "no description of this machine")
        else:
            note = verdict(outcome.error, RUNG_LIMIT) if rung.is_verified else "not verified"
            note += ", fitted" if rung.is_fitted else ""
            minutes = f"{outcome.minutes:.3g}", f"{rung.minutes:.3g}"
            cells = (f"{outcome.step * 1e3:.0f} ms", *minutes, f"{outcome.error:+.0%}", note)
        rows.append((rung.label, str(rung.batch_size), rung.hardware, plan, rule, *cells))
    print("ImageNet, ResNet-50: images of all epochs, without checks of accuracy")
    print_table(rows, "<>><<>>>><")


def print_imagenet_fit() -> None:
    rows = [("machine", "run", "highest efficiency of products", "in the description")]
    for rung in published_imagenet.LADDER:
        if rung.is_fitted:
            known = published_imagenet.machine(rung.cluster).products.highest
            rows.append((rung.cluster, rung.label, f"{published_imagenet.fit(rung):.3g}", f"{known:.3g}"))
    print("Efficiencies of the machines of the ladder, fitted on one run each")
    print_table(rows, "<<>>")


PARTS: dict[str, Callable[[], None]] = {
    "megatron": print_megatron,
    "gpipe": print_gpipe,
    "zero-bubble": print_zero_bubble,
    "imagenet": print_imagenet,
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--fit", action="store_true", help="fit the constants again")
    options = parser.parse_args(arguments)
    print(describe_machine(), end="\n\n")
    if options.fit:
        print_fit()
        print_imagenet_fit()
    for name in options.only:
        PARTS[name]()
    return 0


if __name__ == "__main__":
    sys.exit(main())
