"""`python -m servers.native`: the server process. Binds its port first; what is slow is imported after that."""

from __future__ import annotations

import os
import signal
import sys


def main() -> int:
    """The process's exit status: 0 after SIGTERM, 1 when it cannot serve."""
    # Until the server listens to signals, Ctrl-C ends the process as SIGTERM does, without a traceback of the imports.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Read by libgomp when torch loads it. By default its threads spin while they wait for each other, and one busy
    # neighbour (the client, on a small machine) makes an inference wait whole time slices: measured on two cores
    # beside other work, batch 1, 1,332 ms spinning against 164 ms sleeping. ONNX Runtime's threads do not spin here
    # either, so neither arm has the advantage.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    from pydantic import ValidationError

    from servers.models.registry import UnknownModelError, get_variants
    from servers.models.weights import WeightsError, parse_weights
    from servers.native.listener import ListenerError, bind, check_free
    from servers.native.settings import from_argv
    from servers.options import validation_sentence

    try:
        settings = from_argv(sys.argv[1:])
        specifications = get_variants(settings.model, settings.payloads)
        weights = parse_weights(settings.weights)
        listener = bind(settings.host, settings.http_port)
        check_free(settings.host, settings.grpc_port, "--grpc-port")
    except ValidationError as error:
        return _refuse(validation_sentence(error))
    except (UnknownModelError, WeightsError, ListenerError) as error:
        return _refuse(str(error))

    from servers.native.server import configure_logs, run

    configure_logs(settings.log_level)
    return run(settings, specifications, weights, listener)


def _refuse(message: str) -> int:
    sys.stderr.write(f"abserve native server: {message}\n")
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a load that cannot be interrupted would keep the process, or crash in its half-removed modules.
    os._exit(status)
