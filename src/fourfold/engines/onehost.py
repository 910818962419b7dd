"""One host: where the ranks of a local job meet.

Law: every attempt has a store of its own; what a dead attempt has written is never read.
"""

import socket
from datetime import timedelta

from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


class OneHost(RendezvousHandler):
    """A rendezvous of one agent: a store on the loopback device, a fresh one for every attempt.

    torch's dynamic rendezvous is not used: it pickles its state through a port open to the network, and hands a
    restarted job the store of the dead one, with the dead ranks' addresses in it.
    """

    use_agent_store = True  # type: ignore[assignment]

    def __init__(self, *, run: str) -> None:
        self._run = run
        self._store: TCPStore | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        listener = socket.create_server((LOOPBACK, 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            LOOPBACK,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),
        )
        store = PrefixStore("agent", self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "one-host"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run

    def shutdown(self) -> bool:
        return True
