"""A literal calibration of this machine, so that tests can plan for it without measuring it."""

from dataclasses import fields
from pathlib import Path

from fourfold.cli.plan.machine import threads_of_rank
from fourfold.planner.calibrate.timing import this_machine
from fourfold.planner.predict.calibration import (
    Calibration,
    CollectiveRecord,
    Curve,
    ExchangeRecord,
    MachineIdentity,
    OperationRates,
    calibration_path,
    task_key,
    write_calibration,
)
from fourfold.planner.predict.facts import FactsSource
from fourfold.words.layout import Change

GIGA = Curve((1e6, 1e9), (1e-3, 1.0))  # a billion of anything takes a second
MACHINE = MachineIdentity("a processor", 2, "2.13.0", 1, 2)


def calibration(machine: MachineIdentity = MACHINE) -> Calibration:
    """Prices of a round machine: a billion operations, or bytes, in a second."""
    return Calibration(
        machine=machine,
        load=0.1,
        is_forced=False,
        segments=(),
        collectives=tuple(
            CollectiveRecord(change, machine.ranks_per_host, 1, shares, GIGA)
            for change in Change
            for shares in (False, True)
        ),
        updates={},
        codecs={},
        exchanges=(ExchangeRecord(2, GIGA, GIGA),),
        edge=GIGA,
        edge_between_hosts=None,
        operations=OperationRates(*[GIGA] * len(fields(OperationRates))),
        forward_factor=1.0,
        backward_factor=1.0,
        slowdown=1.0,
        between_actions=1e-5,
        around_step=1e-4,
    )


def pretend_measured(source: FactsSource, num_ranks: int) -> Path:
    """Store the literal calibration as that of this machine for a task; returns the file."""
    machine = this_machine(num_ranks, threads=threads_of_rank(num_ranks))
    path = calibration_path(machine, task_key(source))
    write_calibration(path, calibration(machine))
    return path
