"""What front ends, engines and the supervisor share: settings, errors, memory, messages, statistics."""

from servers.options.libraries import absent

with absent("rich", "better_exceptions"):  # with which structlog would draw what configure_logs does not let it draw
    import structlog as structlog
