"""Several hosts on this machine behind slow links: bytes sent, step time, and time to a fixed loss.

host       a network namespace with a link of limited rate (`fourfold.testing.network_namespaces`; needs root)
contender  a way to train the built-in `lm`; `fourfold:zero=1,codec=fp16` is a plan of Fourfold's
turn       a few steps of one contender, then its validation loss, while the others sleep; contenders rotate
MB         bytes that left a host in a step, with headers, without evaluation: the median over turns and hosts
formula    2 (H − 1) / H of the weights' bytes at zero 0 to 2, 3 (H − 1) / H at zero 3 (DESIGN §3), H hosts
Law: all contenders start from the same weights and see the same batches, rates and clipping.

    python -m bench.multi_host [--hosts 2] [--each 1] [--rate 100mbit|none] [--steps 200] [--target 2.0] [--only ddp,…]
    python -m bench.multi_host --each 2 --rate none --steps 40 --only fourfold,ddp,fsdp2       # bytes between hosts
"""

import argparse
import json
import signal
import sys
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median

from bench.measurement import MB, describe_machine, format_table
from bench.multi_host_worker import FOURFOLD, PEERS, POWERSGD_START, parse_plan
from bench.process_world import World, WorldError
from fourfold.testing.network_namespaces import Hosts
from fourfold.words.errors import FourfoldError

DEFAULT = ("ddp", "ddp-fp16", "ddp-powersgd", FOURFOLD)
PEER = "ddp"
PASSES_OF_ZERO = {0: 2, 1: 2, 2: 2, 3: 3}
BYTES_TOLERANCE = 0.02
ZERO_OF_PEERS = {"ddp": 0, "fsdp2": 3}


@dataclass(frozen=True)
class Settings:
    """What is run, how long, and on which hosts."""

    contenders: tuple[str, ...]
    hosts: int
    each: int
    rate: str | None
    steps: int
    turn: int
    target: float | None
    limit: int

    @property
    def ranks(self) -> int:
        return self.hosts * self.each


@dataclass
class TrainingCurve:
    """One contender's training: seconds per step of the slowest rank, bytes per step and host, loss after each turn."""

    model_bytes: int
    seconds: list[list[float]] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)

    def seconds_to(self, target: float) -> float | None:
        """Seconds of steps until a turn ended at the target loss or below; None if it never did."""
        spent = accumulate(sum(turn) for turn in self.seconds)
        return next((so_far for so_far, loss in zip(spent, self.valid, strict=True) if loss <= target), None)


def measure(setting: Settings) -> dict[str, TrainingCurve]:
    """Run all turns of all contenders."""
    with Hosts(setting.hosts, rate=setting.rate) as hosts, ExitStack() as stack:
        worlds, curves = {}, {}
        for name in setting.contenders:
            options = {"module": "bench.multi_host_worker", "hosts": hosts}
            world = World(name, str(setting.steps), num_ranks=setting.ranks, limit_seconds=setting.limit, **options)
            worlds[name] = stack.enter_context(world)
            curves[name] = TrainingCurve(worlds[name].ready_replies[0]["bytes"])
        for number in range(setting.steps // setting.turn):
            first = number % len(worlds)
            for name in [*worlds, *worlds][first : first + len(worlds)]:
                _show_status(f"turn {number + 1} of {setting.steps // setting.turn}: {name}")
                _run_turn(worlds[name], curves[name], hosts, setting.turn)
        _show_status("")
        return curves


def _run_turn(world: World, curve: TrainingCurve, hosts: Hosts, steps: int) -> None:
    before = hosts.sent_bytes()
    replies = world.request({"steps": steps})
    after = hosts.sent_bytes()
    curve.seconds.append([max(each) for each in zip(*(reply["seconds"] for reply in replies), strict=True)])
    curve.sent_bytes.append(median(a - b for a, b in zip(after, before, strict=True)) / steps)
    valid = world.request({"valid": True})
    curve.valid.append(sum(reply["valid"] for reply in valid) / len(valid))


def zero_of(contender: str, ranks: int) -> int | None:
    """The zero level whose formula applies to a contender; None if it compresses or does not reduce every step."""
    if contender in PEERS:
        return ZERO_OF_PEERS.get(contender)
    plan = parse_plan(contender, ranks)
    return plan.zero if (plan.codec, plan.sync, plan.shard) == ("none", "step", None) else None


def formula_bytes(zero: int, hosts: int, model_bytes: int) -> float:
    """Bytes a host must send in a step: each pass over the weights sends (H − 1) / H of them."""
    return PASSES_OF_ZERO[zero] * (hosts - 1) / hosts * model_bytes


def describe(curves: dict[str, TrainingCurve], setting: Settings) -> str:
    titles = ["", "step ms", f"/ {PEER}", "MB", "/ formula", f"loss {setting.steps}"]
    titles += [f"seconds to {setting.target}"] if setting.target is not None else []
    rows = [titles, *(_row(name, curves, setting) for name in curves)]
    rate = "no limit" if setting.rate is None else setting.rate
    size = next(iter(curves.values())).model_bytes / MB
    lines = [
        f"{setting.hosts} hosts × {setting.each} ranks × 1 thread, {rate} · lm, {size:.2f} MB of weights"
        f" · {setting.steps} steps in turns of {setting.turn}",
        format_table(rows),
    ]
    if "ddp-powersgd" in curves:
        lines.append(f"  ddp-powersgd: rank 2, plain for {POWERSGD_START} steps")
    return "\n".join([*lines, *_verdicts(curves, setting)])


def _row(name: str, curves: dict[str, TrainingCurve], setting: Settings) -> list[str]:
    curve, peer = curves[name], curves.get(PEER)
    ratios = [median(a) / median(b) for a, b in zip(curve.seconds, peer.seconds, strict=True)] if peer else []
    ratio = _ratio_to_formula(name, curve, setting)
    cells = [
        name,
        f"{1e3 * median(second for turn in curve.seconds for second in turn):.1f}",
        f"{median(ratios):.3f}" if ratios else "–",
        f"{median(curve.sent_bytes) / MB:.3f}",
        "–" if ratio is None else f"{ratio:.3f}",
        f"{curve.valid[-1]:.4f}",
    ]
    if setting.target is not None:
        spent = curve.seconds_to(setting.target)
        cells.append("never" if spent is None else f"{spent:.1f}")
    return cells


def _ratio_to_formula(name: str, curve: TrainingCurve, setting: Settings) -> float | None:
    zero = zero_of(name, setting.ranks)
    if zero is None or setting.hosts == 1:
        return None
    return median(curve.sent_bytes) / formula_bytes(zero, setting.hosts, curve.model_bytes)


def _verdicts(curves: dict[str, TrainingCurve], setting: Settings) -> list[str]:
    lines = []
    for name, curve in curves.items():
        ratio = _ratio_to_formula(name, curve, setting)
        if name.startswith(FOURFOLD) and ratio is not None:
            verdict = "reached" if abs(ratio - 1) <= BYTES_TOLERANCE else "missed"
            lines.append(f"  {name}: bytes {ratio:.3f} of the formula, target 1 ± {BYTES_TOLERANCE}: {verdict}")
    return lines


def _show_status(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """Returns 0; 1 if a contender does not run or hosts cannot be made."""
    arguments = vars(_parser().parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds every `with`, which ends hosts and worlds
    file = arguments.pop("json")
    arguments["contenders"] = arguments.pop("only")
    arguments["rate"] = None if arguments["rate"] == "none" else arguments["rate"]
    setting = Settings(**arguments)
    head = describe_machine()
    print(head, flush=True)
    try:
        for name in setting.contenders:
            zero_of(name, setting.ranks)  # raises for an illegal plan before anything starts
        curves = measure(setting)
    except (FourfoldError, WorldError) as error:
        print(f"\n{error}", flush=True)
        return 1
    print(f"\n{describe(curves, setting)}", flush=True)
    if file:
        record = {"machine": head, "setting": vars(setting), "curves": {n: vars(c) for n, c in curves.items()}}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _parse_contenders(text: str) -> tuple[str, ...]:
    # Plans contain commas: a word that does not begin a contender continues the one before.
    chosen: list[str] = []
    for word in text.split(","):
        if word in PEERS or word.partition(":")[0] == FOURFOLD:
            chosen.append(word)
        elif chosen and "=" in word:
            chosen[-1] += f",{word}"
        else:
            names = ", ".join([*PEERS, FOURFOLD, f"{FOURFOLD}:field=value,…"])
            raise argparse.ArgumentTypeError(f"{word}: need some of {names}")
    return tuple(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.multi_host", description=str(__doc__).split("\n")[0])
    parser.add_argument("--only", type=_parse_contenders, default=DEFAULT, help="contenders, comma-separated")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=1, help="ranks per host")
    parser.add_argument(
        "--rate", default="100mbit", help="of each host's link, in both directions, in tc's notation; none: no limit"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turn", type=int, default=20, help="steps per turn")
    parser.add_argument("--target", type=float, help="the validation loss to reach")
    parser.add_argument("--limit", type=int, default=1800, help="seconds after which a world is killed")
    parser.add_argument("--json", metavar="FILE", help="write all figures")
    return parser


if __name__ == "__main__":
    sys.exit(main())
