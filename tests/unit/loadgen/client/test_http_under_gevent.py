"""The raw HTTP client among the users of a patched process."""

from __future__ import annotations

import subprocess
import sys

PATCHED = """
from gevent import monkey; monkey.patch_all()
import gevent, time
from gevent.server import StreamServer
from loadgen.client.http import HttpConnection, request_head
from loadgen.client.connection import Address, PreparedRequest

def serve(connection, _):
    while connection.recv(65536):
        gevent.sleep(0.2)
        connection.sendall(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\nok")

server = StreamServer(("127.0.0.1", 0), serve); server.start()
address = Address("127.0.0.1", server.server_port)
def ask():
    connection = HttpConnection(address)
    return [connection.send(PreparedRequest(request_head("GET", "/", address))).status for _ in range(2)]
started = time.monotonic()
jobs = [gevent.spawn(ask) for _ in range(20)]
gevent.joinall(jobs, raise_error=True)
assert [job.value for job in jobs] == [[200, 200]] * 20
assert time.monotonic() - started < 4.0, "the users waited for each other"
"""


def test_under_gevent_users_do_not_wait_for_each_other() -> None:
    """20 users × 2 requests × 0.2 s would take 8 s one after the other."""
    subprocess.run([sys.executable, "-c", PATCHED], check=True, timeout=60)
