"""Runs the application under uvicorn: listen, load, serve, and finish accepted work when told to stop."""

from __future__ import annotations

import functools
import signal
import socket
from types import FrameType

import structlog
import uvicorn

from servers.native.app import create_app
from servers.native.direct_body import DirectBodyProtocol
from servers.native.inference import InferenceService, State
from servers.native.settings import NativeSettings

log = structlog.get_logger("abserve.server")


class NativeServer(uvicorn.Server):
    """uvicorn's server that begins to load the model as soon as it listens."""

    def __init__(self, config: uvicorn.Config, service: InferenceService) -> None:
        super().__init__(config)
        self._service = service

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, then load."""
        await super().startup(sockets)
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        log.info("listening", url=f"http://{host}:{port}", model=self._service.signature.name)
        self._service.start(self._stop)

    def _stop(self) -> None:
        self.should_exit = True


def serve(settings: NativeSettings, service: InferenceService, listener: socket.socket) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit status. Blocks; to be called in the main thread.

    The engine thread may still be loading when this returns: the caller must not wait for it.
    """
    config = uvicorn.Config(
        create_app(settings, service),
        # uvicorn calls it as it would call a protocol class
        http=functools.partial(DirectBodyProtocol, settings.max_body_bytes),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=max(1, int(settings.shutdown_timeout_s)),
    )
    server = NativeServer(config, service)
    received: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        """uvicorn raises the signal again when it has shut down; dying of it would skip what follows."""
        received.append(signal_number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    server.run(sockets=[listener])
    failed = service.state is State.FAILED
    finished = service.stop(settings.shutdown_timeout_s)
    log.info("stopped", accepted_work_finished=finished)
    if failed:
        return 1
    return 130 if signal.SIGINT in received else 0
