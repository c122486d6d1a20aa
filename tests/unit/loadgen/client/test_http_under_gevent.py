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


STREAMED = """
from gevent import monkey; monkey.patch_all()
import fcntl, gevent, itertools, pytest, termios, time
from gevent.server import StreamServer
from loadgen.client.connection import Address, GreenletSocket, PreparedRequest
from loadgen.client.event_stream import StreamConnection
from loadgen.client.http import request_head

CHUNKED = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
UNTYPED = b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n"
COUNTED = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nContent-Length: %d\\r\\n\\r\\n"
UNTIL_CLOSED = b"HTTP/1.1 200 OK\\r\\nContent-Type: text/event-stream\\r\\nConnection: close\\r\\n\\r\\n"
EVENTS = [b"data: %d\\n\\n" % number for number in range(9)]
LONG = [b"data: " + b"x" * 30_000 + b"\\n\\n"] * 9

def chunk(content):
    return b"%x\\r\\n%s\\r\\n" % (len(content), content)

FORMS = {
    "/chunked": [CHUNKED, *map(chunk, EVENTS), b"0\\r\\n\\r\\n"],
    "/untyped": [UNTYPED, *map(chunk, EVENTS), b"0\\r\\n\\r\\n"],
    "/trailer": [CHUNKED, *map(chunk, EVENTS), b"0\\r\\nA: b\\r\\n", b"\\r\\n"],
    "/split": [CHUNKED, *map(chunk, EVENTS), b"0\\r", b"\\n\\r", b"\\n"],
    "/crlf": [CHUNKED, *[chunk(event.replace(b"\\n", b"\\r\\n")) for event in EVENTS], b"0\\r\\n\\r\\n"],
    "/interim": [b"HTTP/1.1 100 Continue\\r\\n\\r\\n" + CHUNKED + chunk(EVENTS[0]), *map(chunk, EVENTS[1:]),
                 b"0\\r\\n\\r\\n"],
    "/long": [CHUNKED, *map(chunk, LONG), b"0\\r\\n\\r\\n"],
    "/counted": [COUNTED % len(b"".join(EVENTS)), *EVENTS],
    "/closed": [UNTIL_CLOSED, *EVENTS],
}

asking = []

def unread():
    # Whether bytes wait for the client: however late it gets a core, it reads each piece by itself.
    descriptor = asking[-1]._socket._socket.fileno()
    return descriptor >= 0 and any(fcntl.ioctl(descriptor, termios.FIONREAD, bytes(4)))

def serve(connection, _):
    while request := connection.recv(65536):
        path = request.split(b" ")[1].decode()
        for piece in FORMS.get(path, [CHUNKED, chunk(EVENTS[0])]):
            connection.sendall(piece)
            while unread():
                gevent.sleep(0.001)
            gevent.sleep(0.003)
        while path == "/drips" and not connection.sendall(chunk(EVENTS[0])):
            gevent.sleep(0.05)
        if path == "/stands":
            gevent.sleep(60)
        if path in ("/closed", "/cut"):
            connection.close()
            return

server = StreamServer(("127.0.0.1", 0), serve); server.start()
address = Address("127.0.0.1", server.server_port)

def ask(path, timeout_s=10.0, output_tokens=0):
    connection = StreamConnection(address, timeout_s=timeout_s)
    connection.connect()
    asking.append(connection)
    assert isinstance(connection._socket, GreenletSocket)
    head = request_head("GET", path, address)
    exchange = connection.send(PreparedRequest(head, output_tokens=output_tokens))
    return exchange, connection.received(), connection

for path in FORMS:
    for _ in range(2):
        exchange, stream, connection = ask(path)
        assert exchange.failure is None, (path, exchange.failure)
        events = list(stream.events())
        expected = LONG if path == "/long" else EVENTS
        assert [event.data for event in events] == [event[6:-2] for event in expected], path
        moments = [stream.moments[event.read] for event in events]
        assert all(later - earlier > 1_000_000 for earlier, later in itertools.pairwise(moments)), path
        connection.close()
exchange, stream, _ = ask("/cut")
assert exchange.failure == "connection closed by the server in the middle of a response"
assert len(list(stream.events())) == 1
began = time.monotonic()
exchange, stream, _ = ask("/stands", 0.3, 9)
assert exchange.failure == "the server sent nothing for 0.3 s" and 0.2 < time.monotonic() - began < 5.0
assert len(list(stream.events())) == 1
began = time.monotonic()
exchange, stream, _ = ask("/drips", 0.5)
assert exchange.failure == "no complete answer within 0.5 s" and 0.4 < time.monotonic() - began < 5.0
assert len(list(stream.events())) > 2
waits = StreamConnection(address)
waits.connect()
asking.append(waits)
job = gevent.spawn(waits.send, PreparedRequest(request_head("GET", "/stands", address)))
while len(waits._stream.moments) < 2 or not waits._stream.start:
    gevent.sleep(0.001)
waits._socket.close()
assert job.get(timeout=60).failure.startswith("connection failed")
"""


def test_under_gevent_every_form_of_a_stream_is_stamped_piece_by_piece() -> None:
    subprocess.run([sys.executable, "-c", STREAMED], check=True, timeout=60)
