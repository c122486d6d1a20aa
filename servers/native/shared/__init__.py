"""What front ends, engines and the supervisor share: settings, errors, memory, messages, statistics."""
