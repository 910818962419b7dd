"""One host: where the ranks of a local job meet.

agent's store  in the launcher's memory: it is alone with it
ranks' store   a file in the launcher's private folder, a fresh one for every attempt (`words.rendezvous`)
Law: nobody but this user can reach either; what a dead attempt has written is never read.
"""

import socket

from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


class AgentRendezvous(RendezvousHandler):
    """A rendezvous of one agent.

    torch's dynamic rendezvous is not used: it pickles its state through a port open to the network, and hands a
    restarted job the store of the dead one, with the dead ranks' addresses in it.
    """

    use_agent_store = False  # type: ignore[assignment]

    def __init__(self, *, run_id: str) -> None:
        self._run_id = run_id
        self._reserved_socket: socket.socket | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.shutdown()
        # Nobody listens there: MASTER_PORT is for programs of a rank's own that meet as torch has it. Bound, so that
        # no other job is given it; with SO_REUSEADDR they can listen there all the same.
        self._reserved_socket = socket.socket()
        self._reserved_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._reserved_socket.bind((LOOPBACK, 0))
        port = self._reserved_socket.getsockname()[1]
        return RendezvousInfo(PrefixStore("agent", HashStore()), 0, 1, RendezvousStoreInfo(LOOPBACK, port))

    def get_backend(self) -> str:
        return "one-host"

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None: ...

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        if self._reserved_socket is not None:
            self._reserved_socket.close()
        return True
