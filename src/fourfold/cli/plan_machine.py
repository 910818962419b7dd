"""Plan machine: where a plan is to run: a described cluster, or this machine as it was measured.

Law: what a plan is priced with is always said; a measurement of another machine is never used for this one.
"""

import dataclasses
from typing import NamedTuple

from fourfold.plan.predict.cluster import Cluster
from fourfold.plan.predict.prices import Prices
from fourfold.words.errors import Problem, SettingError


class Machine(NamedTuple):
    """Where the task is to run. `text`: for people; `is_here`: it is this machine, as measured."""

    cluster: Cluster
    prices: Prices
    text: str
    is_here: bool


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
