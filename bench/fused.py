"""Fused: updates inside backward compared with updates after it, in one process with one thread.

default, foreach, fused   torch's AdamW: by default, over lists of tensors, in one kernel; `zero_grad` sets to None
fourfold-early            Fourfold with one rank, `update = "in_backward"`
fourfold                  the same, `update = "after"`
                          (its processes run without glibc's tcache, as ranks do: `environment/malloc.py`)
peak                      the largest resident set of the process so far, its libraries included (getrusage)
Law: all take turns in one run and train the same weights, up to the rounding of AdamW as a loop of operations.

    python -m bench.fused [--cases mlp,gpt1] [--rounds 2] [--turns 6]
"""

import argparse
import signal
import sys
from statistics import median
from typing import NamedTuple

from bench.data_parallel import CASES, TOLERANCE, Results, Settings, comma_separated, measure, middle_half
from bench.measurement import MB, describe_machine, format_table
from bench.process_world import WorldError

PEERS = ("default", "foreach", "fused")
FOURFOLD_CONFIGURATIONS = ("fourfold-early", "fourfold")
SAME_KERNEL = ("fused", *FOURFOLD_CONFIGURATIONS)
"""The configurations that compute an update with the same kernel."""


class Target(NamedTuple):
    """The ratios to the peers' step time and to the fused update's memory that `fourfold-early` should reach."""

    ratio_to_default: float
    ratio_to_fused: float
    memory_ratio: float = 0.85


TARGETS = {"mlp": Target(0.40, 0.98), "gpt1": Target(0.86, 1.00)}


def describe(case: str, measured: Results) -> str:
    """The table of a case, the check of its losses, and the targets."""
    titles = ["", "step ms", "/ default", "/ fused", "(half of turns)", "faults", "peak MB", "/ fused", "loss"]
    rows = [titles, *(_row(name, measured) for name in measured.losses)]
    others = sorted(turn.others for turns in measured.turns for turn in turns.values())
    lines = [
        f"{case} · {CASES[case].text} · one process, 1 thread · {len(measured.turns)} turns",
        format_table(rows),
        f"  losses of {', '.join(SAME_KERNEL)} differ by {_max_loss_difference(measured):.1e}",
        f"  other processes used {median(others):.2f} cores (median of turns), {others[-1]:.2f} at most",
    ]
    target, early = TARGETS[case], FOURFOLD_CONFIGURATIONS[0]
    ratios = [
        ("step, ratio to default", median(measured.ratios(early, "default")), target.ratio_to_default),
        ("step, ratio to fused", median(measured.ratios(early, "fused")), target.ratio_to_fused),
        ("peak, ratio to fused", _peak_bytes(measured, early) / _peak_bytes(measured, "fused"), target.memory_ratio),
    ]
    for what, value, limit in ratios:
        lines.append(f"  {what}: {value:.3f}, target ≤ {limit:.2f}: {'reached' if value <= limit else 'missed'}")
    return "\n".join(lines)


def _row(name: str, measured: Results) -> list[str]:
    peak = _peak_bytes(measured, name)
    return [
        name,
        f"{1e3 * measured.median(name, 'seconds'):.1f}",
        f"{median(measured.ratios(name, 'default')):.3f}",
        f"{median(measured.ratios(name, 'fused')):.3f}",
        middle_half(measured.ratios(name, "fused")),
        f"{measured.median(name, 'page_faults'):.0f}",
        f"{peak / MB:.0f}",
        f"{peak / _peak_bytes(measured, 'fused'):.3f}",
        f"{measured.losses[name][-1]:.5f}",
    ]


def _peak_bytes(measured: Results, name: str) -> float:
    return max(turns[name].peak_bytes for turns in measured.turns)


def _max_loss_difference(measured: Results) -> float:
    first, *others = (measured.losses[name] for name in SAME_KERNEL)
    return max(abs(a - b) / max(abs(a), abs(b)) for other in others for a, b in zip(first, other, strict=True))


def main() -> int:
    """Returns 0, or 1 if losses disagree or a configuration does not run."""
    parser = argparse.ArgumentParser(prog="python -m bench.fused", description=str(__doc__).split("\n")[0])
    parser.add_argument("--cases", type=comma_separated(tuple(TARGETS)), default=tuple(TARGETS), help="comma-separated")
    parser.add_argument("--rounds", type=int, default=2, help="fresh starts of all processes")
    parser.add_argument("--turns", type=int, default=6, help="turns of a round")
    parser.add_argument("--steps", type=int, help="timed steps of a turn; each case has its own default")
    parser.add_argument("--limit", type=int, default=600, help="seconds after which a process is ended")
    arguments = vars(parser.parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # leaves every `with` block: the processes end too
    cases, failed = arguments.pop("cases"), False
    setting = Settings(configurations=(*PEERS, *FOURFOLD_CONFIGURATIONS), ranks=1, **arguments)
    print(describe_machine(), flush=True)
    for case in cases:
        try:
            measured = measure(case, setting, memory=False)
        except WorldError as error:
            print(f"\n{error}", flush=True)
            failed = True
            continue
        print(f"\n{describe(case, measured)}", flush=True)
        failed |= _max_loss_difference(measured) > TOLERANCE
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
