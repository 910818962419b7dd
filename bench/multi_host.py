"""Several hosts on this machine behind slow links: bytes sent, step time, and time to a fixed loss.

host       a network namespace with a link of limited rate (`fourfold.testing.network_namespaces`; needs root)
contender  a way to train the built-in `lm`; `fourfold:zero=1,codec=fp16` is a plan of ours
turn       a few steps of one contender, then its validation loss, while the others sleep; turns rotate
MB         bytes that left a host in a step, headers included, evaluation not: the median over turns and hosts
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
from bench.multi_host_worker import OURS, PEERS, POWERSGD_START, parse_plan
from bench.process_world import World, WorldError
from fourfold.testing.network_namespaces import Hosts
from fourfold.words.errors import FourfoldError

DEFAULT = ("ddp", "ddp-fp16", "ddp-powersgd", OURS)
PEER = "ddp"
PASSES_OF_ZERO = {0: 2, 1: 2, 2: 2, 3: 3}
BYTES_TOLERANCE = 0.02
ZERO_OF_PEERS = {"ddp": 0, "fsdp2": 3}


@dataclass(frozen=True)
class Settings:
    """How much is run, and on what."""

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
    """One contender's training: the slowest rank's seconds a step, bytes a step and host, losses after each turn."""

    model_bytes: int
    seconds: list[list[float]] = field(default_factory=list)
    sent_bytes: list[float] = field(default_factory=list)
    valid: list[float] = field(default_factory=list)

    def seconds_to(self, target: float) -> float | None:
        """Seconds of steps until a turn ended at the target or below; None where it never did."""
        spent = accumulate(sum(turn) for turn in self.seconds)
        return next((so_far for so_far, loss in zip(spent, self.valid, strict=True) if loss <= target), None)


def measure(setting: Settings) -> dict[str, TrainingCurve]:
    """All turns of all contenders."""
    with Hosts(setting.hosts, rate=setting.rate) as hosts, ExitStack() as stack:
        worlds, courses = {}, {}
        for name in setting.contenders:
            options = {"module": "bench.multi_host_worker", "hosts": hosts}
            world = World(name, str(setting.steps), num_ranks=setting.ranks, limit_seconds=setting.limit, **options)
            worlds[name] = stack.enter_context(world)
            courses[name] = TrainingCurve(worlds[name].ready_replies[0]["bytes"])
        for number in range(setting.steps // setting.turn):
            first = number % len(worlds)
            for name in [*worlds, *worlds][first : first + len(worlds)]:
                _show_status(f"turn {number + 1} of {setting.steps // setting.turn}: {name}")
                _run_turn(worlds[name], courses[name], hosts, setting.turn)
        _show_status("")
        return courses


def _run_turn(world: World, course: TrainingCurve, hosts: Hosts, steps: int) -> None:
    before = hosts.sent_bytes()
    replies = world.request({"steps": steps})
    after = hosts.sent_bytes()
    course.seconds.append([max(each) for each in zip(*(reply["seconds"] for reply in replies), strict=True)])
    course.sent_bytes.append(median(a - b for a, b in zip(after, before, strict=True)) / steps)
    valid = world.request({"valid": True})
    course.valid.append(sum(reply["valid"] for reply in valid) / len(valid))


def zero_of(contender: str, ranks: int) -> int | None:
    """The zero level whose formula a contender is measured against; None where what it sends is compressed or rare."""
    if contender in PEERS:
        return ZERO_OF_PEERS.get(contender)
    plan = parse_plan(contender, ranks)
    return plan.zero if (plan.codec, plan.sync, plan.shard) == ("none", "step", None) else None


def formula_bytes(zero: int, hosts: int, model_bytes: int) -> float:
    """What a host must send in a step: each pass over the weights' bytes is (H − 1) / H of them."""
    return PASSES_OF_ZERO[zero] * (hosts - 1) / hosts * model_bytes


def describe(courses: dict[str, TrainingCurve], setting: Settings) -> str:
    titles = ["", "step ms", f"/ {PEER}", "MB", "/ formula", f"loss {setting.steps}"]
    titles += [f"seconds to {setting.target}"] if setting.target is not None else []
    rows = [titles, *(_row(name, courses, setting) for name in courses)]
    rate = "no limit" if setting.rate is None else setting.rate
    size = next(iter(courses.values())).model_bytes / MB
    lines = [
        f"{setting.hosts} hosts × {setting.each} ranks × 1 thread, {rate} · lm, {size:.2f} MB of weights"
        f" · {setting.steps} steps in turns of {setting.turn}",
        format_table(rows),
    ]
    if "ddp-powersgd" in courses:
        lines.append(f"  ddp-powersgd: rank 2, plain for {POWERSGD_START} steps")
    return "\n".join([*lines, *_verdicts(courses, setting)])


def _row(name: str, courses: dict[str, TrainingCurve], setting: Settings) -> list[str]:
    course, peer = courses[name], courses.get(PEER)
    ratios = [median(a) / median(b) for a, b in zip(course.seconds, peer.seconds, strict=True)] if peer else []
    share = _ratio_to_formula(name, course, setting)
    cells = [
        name,
        f"{1e3 * median(second for turn in course.seconds for second in turn):.1f}",
        f"{median(ratios):.3f}" if ratios else "–",
        f"{median(course.sent_bytes) / MB:.3f}",
        "–" if share is None else f"{share:.3f}",
        f"{course.valid[-1]:.4f}",
    ]
    if setting.target is not None:
        spent = course.seconds_to(setting.target)
        cells.append("never" if spent is None else f"{spent:.1f}")
    return cells


def _ratio_to_formula(name: str, course: TrainingCurve, setting: Settings) -> float | None:
    zero = zero_of(name, setting.ranks)
    if zero is None or setting.hosts == 1:
        return None
    return median(course.sent_bytes) / formula_bytes(zero, setting.hosts, course.model_bytes)


def _verdicts(courses: dict[str, TrainingCurve], setting: Settings) -> list[str]:
    lines = []
    for name, course in courses.items():
        share = _ratio_to_formula(name, course, setting)
        if name.startswith(OURS) and share is not None:
            verdict = "reached" if abs(share - 1) <= BYTES_TOLERANCE else "missed"
            lines.append(f"  {name}: bytes {share:.3f} of the formula, reach 1 ± {BYTES_TOLERANCE}: {verdict}")
    return lines


def _show_status(text: str) -> None:
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def main() -> int:
    """0, or 1 where a contender does not run or hosts cannot be had."""
    arguments = vars(_parser().parse_args())
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # by way of every `with`: hosts and worlds end too
    file = arguments.pop("json")
    arguments["contenders"] = arguments.pop("only")
    arguments["rate"] = None if arguments["rate"] == "none" else arguments["rate"]
    setting = Settings(**arguments)
    head = describe_machine()
    print(head, flush=True)
    try:
        for name in setting.contenders:
            zero_of(name, setting.ranks)  # a plan that cannot be is told of before anything starts
        courses = measure(setting)
    except (FourfoldError, WorldError) as error:
        print(f"\n{error}", flush=True)
        return 1
    print(f"\n{describe(courses, setting)}", flush=True)
    if file:
        record = {"machine": head, "setting": vars(setting), "courses": {n: vars(c) for n, c in courses.items()}}
        Path(file).write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _parse_contenders(text: str) -> tuple[str, ...]:
    # Plans have commas of their own: what does not begin a contender goes on with the one before.
    chosen: list[str] = []
    for word in text.split(","):
        if word in PEERS or word.partition(":")[0] == OURS:
            chosen.append(word)
        elif chosen and "=" in word:
            chosen[-1] += f",{word}"
        else:
            names = ", ".join([*PEERS, OURS, f"{OURS}:field=value,…"])
            raise argparse.ArgumentTypeError(f"{word}: need some of {names}")
    return tuple(chosen)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench.multi_host", description=str(__doc__).split("\n")[0])
    parser.add_argument("--only", type=_parse_contenders, default=DEFAULT, help="contenders, comma-separated")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--each", type=int, default=1, help="ranks of a host")
    parser.add_argument(
        "--rate", default="100mbit", help="of each host's link, both ways, as tc has it; none: no limit"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--turn", type=int, default=20, help="steps of a turn")
    parser.add_argument("--target", type=float, help="the validation loss whose time is asked for")
    parser.add_argument("--limit", type=int, default=1800, help="seconds after which a world is ended")
    parser.add_argument("--json", metavar="FILE", help="write every single figure")
    return parser


if __name__ == "__main__":
    sys.exit(main())
