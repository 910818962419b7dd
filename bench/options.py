"""What it costs a step to compare the optimizer's options: the text that its call carries, and the call's own cost.

unchanged  options as in the step before
schedule   the rate of every group is new in each step, as with a schedule

    PYTHONPATH=src:. python bench/options.py
"""

import timeit

import torch

from bench.measure import machine
from fourfold.parts.comm import calls
from fourfold.parts.options import Options

TIMES = 5000
CALL = "step 1000, positions 2000 to 2002 of epoch 0, seed 0"


def microseconds(act) -> float:
    return min(timeit.repeat(act, number=TIMES, repeat=5)) / TIMES * 1e6


def main() -> None:
    print(machine())
    plain = microseconds(lambda: calls.tag(CALL))
    for num_groups in (1, 2, 12, 48):
        weights = [torch.nn.Parameter(torch.zeros(2)) for _ in range(num_groups)]
        optimizer = torch.optim.AdamW([{"params": [weight]} for weight in weights], lr=1e-3)
        options, rate = Options(optimizer), [1e-3]

        def scheduled(optimizer=optimizer, options=options, rate=rate) -> None:
            rate[0] *= 0.9999
            for number, group in enumerate(optimizer.param_groups):
                group["lr"] = rate[0] / (1 + number)
            options.text()

        same, changing = microseconds(options.text), microseconds(scheduled)
        text = calls.with_options(CALL, options.text())
        call = microseconds(lambda text=text: calls.tag(text)) - plain
        board = microseconds(lambda text=text: calls.encode(text)) - microseconds(lambda: calls.encode(CALL))
        print(
            f"{num_groups:3} groups: unchanged {same:.1f} µs, schedule {changing:.1f} µs; "
            f"the longer call: tag {call:+.1f} µs, board {board:+.1f} µs"
        )


if __name__ == "__main__":
    main()
