"""Reads streams of a server and does nothing else; bench/serve.py runs it. Bodies of requests come
as JSON on stdin; what it says on stdout: seconds, and how many streams ended well."""

import json
import selectors
import socket
import sys
import time

port = int(sys.argv[1])
bodies = json.load(sys.stdin)
selector = selectors.DefaultSelector()
begin = time.perf_counter()
for body in bodies:
    connection = socket.create_connection(("127.0.0.1", port))
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    connection.sendall((head + body).encode())
    selector.register(connection, selectors.EVENT_READ, bytearray())
finished = 0
while selector.get_map():
    for key, _ in selector.select():
        data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
        if data:
            key.data[:] = (key.data + data)[-64:]
            continue
        finished += b"[DONE]" in key.data
        selector.unregister(key.fileobj)
seconds = time.perf_counter() - begin
json.dump({"seconds": seconds, "finished": finished}, sys.stdout)
