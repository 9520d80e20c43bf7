"""Which node of a run with several this one is: the first, which listens, or another.

Free of torch.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Iterator

from accel.machine.errors import AccelError, ConfigError
from runner.exit_codes import INTERRUPTED
from runner.launch import failures, messages
from runner.launch.messages import Connection
from runner.recipe import nodes, processes
from runner.recipe.nodes import Endpoint
from runner.recipe.schema import Distributed

# The socket of the first node, by address: bound once, so that a second command on the same machine
# finds it taken, and kept for all runs of this process.
_LISTENING: dict[Endpoint, socket.socket] = {}


def spans_nodes(distributed: Distributed) -> bool:
    """Return whether this command is one of several nodes' that rendezvous with each other."""
    of_nodes = distributed.kind == nodes.KIND and distributed.rdzv_endpoint is not None
    return of_nodes and processes.adopted() is None


def is_member(distributed: Distributed) -> bool:
    """Return whether this node joins the run of another one, the first; else it listens from now.

    Raises:
        ConfigError: if it is to be the first, and the address is taken or none of this machine's.
    """
    endpoint = nodes.endpoint(distributed)
    if endpoint is None or not spans_nodes(distributed) or endpoint in _LISTENING:
        return False
    first = distributed.is_host
    if first is None and distributed.node_rank is not None:
        first = distributed.node_rank == 0
    if first is False or (first is None and not endpoint.is_local()):
        return True
    try:
        _LISTENING[endpoint] = messages.listen(endpoint)
    except OSError as error:
        if first is None:
            return True  # the first node, on the same machine, has taken it
        rule = f"the first node listens there, and that failed ({error.strerror or error})"
        remedy = "End what listens there, or choose another port on all nodes."
        raise ConfigError.of(f"distributed.rdzv_endpoint={endpoint}", rule, remedy) from error
    return False


def listener(distributed: Distributed) -> socket.socket:
    """Return the listening socket of the first node.

    Raises:
        ConfigError: if this node is not the first.
    """
    endpoint = nodes.endpoint(distributed)
    assert endpoint is not None
    if is_member(distributed):
        rule = "another command listens there: this would be a second run"
        remedy = "Choose another port on all nodes."
        raise ConfigError.of(f"distributed.rdzv_endpoint={endpoint}", rule, remedy)
    return _LISTENING[endpoint]


@contextlib.contextmanager
def ending_with() -> Iterator[Callable[[int], int]]:
    """End nodes that have come, and whom no run has admitted, with this command's exit code.

    It may be refused, or have nothing left to do, after it began to listen. The context gets a
    function that takes the exit code, and returns it.
    """

    def end(code: int, text: str = "the first node has ended; see what it prints") -> int:
        for waiting in _LISTENING.values():
            while select.select([waiting], [], [], 0.0)[0]:
                connection = Connection(waiting.accept()[0], messages.SEND_SECONDS)
                connection.send("finish", code=code, text=text)
                connection.close()
        return code

    try:
        yield end
    except AccelError as error:
        end(failures.exit_code(error), f"the first node has ended: {error}")
        raise
    except KeyboardInterrupt:
        end(INTERRUPTED)
        raise
