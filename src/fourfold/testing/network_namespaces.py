"""Hosts on one machine: network namespaces, each behind a link of limited rate.

host    a namespace with one interface; its processes see no other network, and share memory only among themselves
bridge  a namespace that joins the hosts; it limits what is sent to a host, and the host limits what it sends
owner   the process that made them; its pid and start ticks are in the names
Law: what is made here is removed when the `with` block ends, or by the next user once its owner is dead; only processes
inside these namespaces are ever killed.

Needs root (CAP_SYS_ADMIN, CAP_NET_ADMIN), `ip` and `tc` of iproute2, and the kernel's token bucket filter.
"""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Self

from fourfold.environment.processes import process_id, this_process
from fourfold.words.errors import LaunchError, Problem

PREFIX = "fourfold"
INTERFACE = "e0"
BRIDGE = "br0"
COMMAND_TIMEOUT_SECONDS = 20
_counter = itertools.count()


class HostsUnavailable(LaunchError):
    """This machine or this user cannot make namespaces with limited links."""


@dataclass(frozen=True)
class Host:
    """One namespace."""

    name: str
    address: str

    def command(self, command: Sequence[str]) -> list[str]:
        """The command that runs `command` on this host. `ip` replaces itself by it, so the pid is the command's."""
        return ["ip", "netns", "exec", self.name, *command]

    def sent_bytes(self) -> int:
        """Bytes that have left this host since it was made, headers and acknowledgements included."""
        links = json.loads(_ip("-n", self.name, "-s", "-j", "link", "show", "dev", INTERFACE))
        return links[0]["stats64"]["tx"]["bytes"]


class Hosts(AbstractContextManager["Hosts"]):
    """`count` hosts, made on entry and removed on exit with every process in them. Raises HostsUnavailable.

    `rate` limits each host in both directions, in tc's notation ("100mbit"); None: no limit.
    """

    def __init__(self, count: int, *, rate: str | None = "100mbit") -> None:
        base = f"{PREFIX}-{os.getpid()}-{this_process().start_ticks}-{next(_counter)}"
        self.hosts = tuple(Host(f"{base}-{index}", f"10.93.0.{10 + index}") for index in range(count))
        self.rate, self._bridge = rate, f"{base}-bridge"

    def __enter__(self) -> Self:
        _check_tools()
        remove_stale()
        try:
            self._create()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        existing = set(_namespaces())
        for name in (*(host.name for host in self.hosts), self._bridge):
            if name in existing:
                _remove(name)

    def host_of(self, rank: int, size: int) -> Host:
        """The host of a rank: consecutive ranks share a host, the same number on each."""
        if size % len(self.hosts):
            raise LaunchError(Problem(f"{size} ranks on {len(self.hosts)} hosts", "as many ranks on each host"))
        return self.hosts[rank * len(self.hosts) // size]

    def rank_environ(self, rank: int, size: int) -> dict[str, str]:
        """The variables that a launcher would set for this rank, and the interface for gloo to use."""
        self.host_of(rank, size)
        local_size = size // len(self.hosts)
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
        variables = {name: str(value) for name, value in place.items()}
        return {**variables, "MASTER_ADDR": self.hosts[0].address, "GLOO_SOCKET_IFNAME": INTERFACE}

    def sent_bytes(self) -> list[int]:
        return [host.sent_bytes() for host in self.hosts]

    def set_rate(self, rate: str) -> None:
        """Limit each host in both directions from now on. Only where there was a limit before."""
        for index, host in enumerate(self.hosts):
            _limit_rate(host.name, INTERFACE, rate, verb="change")
            _limit_rate(self._bridge, f"v{index}", rate, verb="change")

    def set_link(self, index: int, state: str) -> None:
        """Cut a host off ("down"), or join it again ("up")."""
        _ip("-n", self._bridge, "link", "set", f"v{index}", state)

    def _create(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", BRIDGE, "type", "bridge")
        _ip("-n", self._bridge, "link", "set", BRIDGE, "up")
        for index, host in enumerate(self.hosts):
            port = f"v{index}"
            _ip("netns", "add", host.name)
            veth = ["link", "add", INTERFACE, "netns", host.name, "type", "veth"]
            _ip(*veth, "peer", "name", port, "netns", self._bridge)
            _ip("-n", self._bridge, "link", "set", port, "master", BRIDGE, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
            _ip("-n", host.name, "link", "set", INTERFACE, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
            if self.rate is not None:
                _limit_rate(host.name, INTERFACE, self.rate)
                _limit_rate(self._bridge, port, self.rate)


def unavailable_reason() -> str | None:
    """Why hosts cannot be made here, found out by making one; None if they can."""
    try:
        with Hosts(1):
            return None
    except HostsUnavailable as error:
        return str(error)


def remove_stale() -> None:
    """Remove what dead owners have left: their namespaces, and the processes in them."""
    for name in _namespaces():
        match = re.fullmatch(rf"{PREFIX}-(\d+)-(\d+)-\d+-\w+", name)
        if match and process_id(int(match[1])).start_ticks != int(match[2]):
            _remove(name)


def _limit_rate(name: str, device: str, rate: str, *, verb: str = "add") -> None:
    filtered = ["tbf", "rate", rate, "burst", "128kb", "latency", "100ms"]
    _run(["tc", "-n", name, "qdisc", verb, "dev", device, "root", *filtered])


def _namespaces() -> list[str]:
    return [line.split()[0] for line in _ip("netns", "list").splitlines() if line.startswith(f"{PREFIX}-")]


def _remove(name: str) -> None:
    try:
        _kill_processes(name)
        _ip("netns", "del", name)
    except HostsUnavailable:
        if name in _namespaces():  # else another process has removed it first
            raise


def _kill_processes(name: str) -> None:
    for pid in map(int, _ip("netns", "pids", name).split()):
        with suppress(ProcessLookupError):  # it has ended by itself
            # Through a handle: by now the pid may be another process's.
            handle = os.pidfd_open(pid)
            try:
                if str(pid) in _ip("netns", "pids", name).split():
                    signal.pidfd_send_signal(handle, signal.SIGKILL)
            finally:
                os.close(handle)


def _check_tools() -> None:
    absent = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    problems = [Problem(f"no {tool}", "iproute2", "apt-get install iproute2") for tool in absent]
    if os.geteuid() != 0:
        problems.append(Problem(f"user {os.geteuid()}", "root, to make network namespaces", "sudo"))
    if problems:
        raise HostsUnavailable(problems, where="hosts on one machine")


def _ip(*arguments: str) -> str:
    return _run(["ip", *arguments])


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_SECONDS)
    if done.returncode:
        got = f"{' '.join(command)}: {done.stderr.strip() or done.returncode}"
        problem = Problem(got, "CAP_SYS_ADMIN, CAP_NET_ADMIN and the kernel's sch_tbf", "a machine of your own")
        raise HostsUnavailable(problem, where="hosts on one machine")
    return done.stdout
