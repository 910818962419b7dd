"""Local rendezvous: where the agent and the ranks of a job on one host meet.

agent's store  in the launcher's memory, which no other process reads
ranks' store   a file in the launcher's private folder, a new one for every attempt (`environment/rendezvous.py`)
Law: only this user can reach either store, and no attempt reads what an earlier one has written.
"""

import socket

from torch.distributed import HashStore, PrefixStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

LOOPBACK = "127.0.0.1"


class AgentRendezvous(RendezvousHandler):
    """A rendezvous with one agent in it.

    torch's dynamic rendezvous would pickle its state through a port open to the network, and would give a restarted
    job the store of the dead one, with the addresses of dead ranks in it.
    """

    use_agent_store = False  # type: ignore[assignment]

    def __init__(self, *, run_id: str) -> None:
        self._run_id = run_id
        self._reserved_socket: socket.socket | None = None

    def next_rendezvous(self) -> RendezvousInfo:
        self.shutdown()
        # Nothing listens at this port: MASTER_PORT is for scripts that build a TCPStore of their own. It is bound, so
        # that no other job gets it; with SO_REUSEADDR the scripts can listen there all the same.
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
