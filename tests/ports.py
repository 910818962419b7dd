"""Ports for servers that are started later."""

import contextlib
import random
import socket


def free_ports(number: int) -> list[int]:
    """Ports that are free now, outside of Linux's ephemeral range."""
    with contextlib.ExitStack() as stack:
        listeners = []
        while len(listeners) < number:
            with contextlib.suppress(OSError):
                port = random.randrange(20000, 32000)
                listeners.append(stack.enter_context(socket.create_server(("127.0.0.1", port))))
        return [listener.getsockname()[1] for listener in listeners]
