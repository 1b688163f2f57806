"""A process that has imported the command once and forks for each time that it is run.

    python command_server.py DESCRIPTOR

DESCRIPTOR is a socket. A message on it is a command as JSON (arguments, environment, folder, CPUs)
with its three streams. The answers are its process id and, at its end, its exit status.
"""

from __future__ import annotations

import array
import json
import os
import socket
import sys
import warnings
from typing import Any

MOST_BYTES = 100_000  # of a message


def main() -> None:
    import helm.commands.plan
    import helm.commands.run
    import helm.session.study  # noqa: F401
    from helm.commands.cli import main as command

    calls = socket.socket(fileno=int(sys.argv[1]))
    while True:
        message, descriptors, _, _ = socket.recv_fds(calls, MOST_BYTES, 3)
        if not message:
            return
        with warnings.catch_warnings():  # numpy has threads, which do nothing
            warnings.simplefilter("ignore")
            child = os.fork()
        if child == 0:
            calls.close()
            become(json.loads(message), descriptors)
            raise SystemExit(command())
        for descriptor in descriptors:
            os.close(descriptor)
        calls.send(array.array("q", [child]))
        calls.send(array.array("q", [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])]))


def become(run: dict[str, Any], descriptors: list[int]) -> None:
    """Takes on what a process of its own would have begun with."""
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(run["folder"])
    os.sched_setaffinity(0, run["cpus"])
    os.environ.clear()
    os.environ.update(run["environment"])
    sys.argv[1:] = run["arguments"]


if __name__ == "__main__":
    main()
