"""Plan machine: where a plan is to run: a described cluster, or this machine as it was measured.

Law: what a plan is priced with is always said; a measurement of another machine is never used for this one.
"""

import dataclasses
from typing import NamedTuple

from fourfold.plan.precision import COMPUTE_FORMATS
from fourfold.plan.predict.cluster import Cluster
from fourfold.plan.predict.prices import Prices
from fourfold.words.errors import Problem, SettingError


class Machine(NamedTuple):
    """Where the task is to run. `text`: for people; `is_here`: it is this machine, as measured."""

    cluster: Cluster
    prices: Prices
    text: str
    is_here: bool

    @property
    def mixed_precision(self) -> str:
        """The 16-bit precision that the devices are fast in; "keep" if they have none."""
        dtypes = self.cluster.flops_per_second
        return next((name for name, row in COMPUTE_FORMATS.items() if row.dtype in dtypes), "keep")

    def peak_flops(self, precision: str) -> float | None:
        """Operations a second that a device does at most in this precision; None: not known."""
        row = COMPUTE_FORMATS.get(precision)
        return self.cluster.flops_per_second.get(row.dtype if row else "float32")


def find_machine(cluster: str | None, *, devices: int | None, network: float | None) -> Machine:
    """The cluster of this name or file, else this machine. Raises FourfoldError.

    devices  how many there are to be; None: those of the cluster
    network  bytes a second that a rank sends to another host; None: the cluster's
    """
    return _this_machine(devices) if cluster is None else _described(cluster, devices, network)


def _described(name: str, devices: int | None, network: float | None) -> Machine:
    from fourfold.plan.predict.cluster_file import load_cluster
    from fourfold.plan.predict.roofline import RooflinePrices

    cluster = load_cluster(name)
    if network is not None:
        if cluster.network is None:
            got = f"network = …, and {name} is one host"
            raise SettingError(Problem(got, "a cluster with a network", "a table [network] in its file"))
        cluster = dataclasses.replace(cluster, network=cluster.network._replace(bandwidth=network))
    if devices is not None:
        cluster = cluster.resized(devices)
    hosts = f"{cluster.hosts} hosts" if cluster.hosts > 1 else "one host"
    text = f"{cluster.num_devices} devices of {cluster.name}, {hosts}"
    return Machine(cluster, RooflinePrices(cluster), text, is_here=False)
