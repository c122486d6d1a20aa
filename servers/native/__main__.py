"""`python -m servers.native`: the server process. It binds its port before it imports anything slow."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial


def main() -> int:
    """Serve, and return the exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 when it cannot serve."""
    # Until the server handles signals, Ctrl-C ends the process without a traceback, as SIGTERM does.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

    from pydantic import ValidationError

    from servers.engines.padding import padding_of
    from servers.engines.processors import wait_policy
    from servers.engines.settings import EngineError, parse_spinning
    from servers.language.specification import LanguageModel, is_language_model, language_model
    from servers.models.registry import UnknownModelError, get_variants
    from servers.models.weights import WeightsError, parse_weights
    from servers.native.shared.keys import Keys
    from servers.native.shared.recording import check_recording
    from servers.native.shared.settings import NativeSettings, watched_files
    from servers.native.shared.tls import Certificate
    from servers.options.command_line import from_argument, validation_sentence
    from servers.options.defaults import OptionError
    from servers.options.launch import bind
    from servers.options.stages import stage

    model: LanguageModel | None = None
    try:
        requested = from_argument(NativeSettings, sys.argv[1:])
        if is_language_model(requested.model):
            model = language_model(requested.model, requested.weights)
            settings = requested.resolved_for(model)
            os.environ.update(wait_policy(parse_spinning(settings.spinning)))
        else:
            requested.check_for_tensors()
            os.environ.update(wait_policy(parse_spinning(requested.spinning)))
            with stage("describe"):
                specifications = get_variants(requested.model, requested.payloads)
            settings = requested.resolved(specifications[0])
            settings.engine_settings().check()
            padding_of(specifications[0], settings.pad_sizes)
            weights = parse_weights(settings.weights, specifications[0].default_weights)
            watched_files(settings, specifications, weights)
        check_recording(settings)
        access = Keys.of(settings), Certificate.of(settings)
        if access != (None, None) or settings.reload != "off":
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until it is handled, which reads the files again anyway
        listener = bind(settings.host, settings.http_port)
        grpc_listener = bind(settings.host, settings.grpc_port, "--grpc-port") if settings.grpc_port else None
    except ValidationError as error:
        return _refuse(validation_sentence(error))
    except (UnknownModelError, WeightsError, EngineError, OptionError) as error:
        return _refuse(str(error))

    from servers.native.server import configure_logs, run, serve_language

    configure_logs(settings.log_level)
    if model is None:
        return run(settings, specifications, weights, listener, grpc_listener)

    from servers.language.engine import make_engine

    build = partial(make_engine, model, settings.language_engine())
    return serve_language(settings, model.name, model.label, build, listener, grpc_listener)


def _refuse(message: str) -> int:
    sys.stderr.write(f"abserve native server: {message}\n")
    return 1


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Not sys.exit: a load that cannot be interrupted would keep the process alive, or crash in unloaded modules.
    os._exit(status)
