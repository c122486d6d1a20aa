"""The registry of checks: the title, severity and remedy of each, whatever its outcome.

Adding a check means adding its name to `check_names`, a definition here (in `fairness.definitions` for what is checked
before the load) and a function that makes it to one of the modules that `loadgen.analysis.analysis` calls.
"""

from __future__ import annotations

from loadgen.analysis.checks.fairness.definitions import FAIRNESS_DEFINITIONS
from loadgen.analysis.checks.names import CheckDefinition, CheckName, Severity

__all__ = ["DEFINITIONS", "CheckDefinition", "CheckName", "Severity"]

DEFINITIONS: dict[CheckName, CheckDefinition] = {
    CheckName.GPU_PRESENT: CheckDefinition(
        "a GPU did the work", "informs", "informs", "Run on a machine with an NVIDIA GPU to compare GPU serving."
    ),
    CheckName.GPU_EVIDENCE: CheckDefinition(
        "both arms are proven to run on the same GPU",
        "invalidates",
        "invalidates",
        "Read the findings below and docs/gpu-proof.md: each code has its remedy there.",
    ),
    CheckName.NEGATIVE_CONTROL: CheckDefinition(
        "a deliberate CPU run is recognised as one",
        "warns",
        "informs",
        "Let nothing else use the GPU: what keeps it busy while a server computes on the CPU blurs every finding.",
    ),
    CheckName.RUN_FINISHED: CheckDefinition(
        "the run finished as planned", "invalidates", "invalidates", "Run the comparison again and let it finish."
    ),
    CheckName.PARITY: CheckDefinition(
        "both arms give the same answers",
        "invalidates",
        "invalidates",
        "Make both arms serve the same weights, precision and preprocessing; the parity table names the case.",
    ),
    CheckName.SAME_PAYLOAD: CheckDefinition(
        "both arms were sent the same payload", "invalidates", "informs", "Give both arms the same --payload."
    ),
    CheckName.REQUEST_ERRORS: CheckDefinition(
        "no request failed", "invalidates", "invalidates", "Read the error messages and the log of the server named."
    ),
    CheckName.WHOLE_ANSWERS: CheckDefinition(
        "no answer was much smaller than the others",
        "invalidates",
        "informs",
        "Look at what the server answers under load: an answer with status 200 and without its outputs is a failure.",
    ),
    CheckName.REPEATED_REQUESTS: CheckDefinition(
        "a repeated request takes as long as a new one",
        "invalidates",
        "informs",
        "Turn the response cache of that server off: the load repeats its bodies, so the model is hardly asked.",
    ),
    CheckName.BLOCKS_COMPLETE: CheckDefinition(
        "every planned block is complete",
        "invalidates",
        "invalidates",
        "Find out what cut the block short (a dead server, Ctrl-C, a full disk) and run again.",
    ),
    CheckName.SEARCHES_ENDED: CheckDefinition(
        "every search and ramp came to a value",
        "invalidates",
        "invalidates",
        "Choose a bound within both servers' reach (--slo-p99-ms), let a ramp go further (--ramp-users), or find out "
        "what cut it short.",
    ),
    CheckName.SAMPLES_COMPLETE: CheckDefinition(
        "no sample was lost",
        "invalidates",
        "invalidates",
        "Check the disk and run again: a lost sample hides a slow one.",
    ),
    CheckName.COLD_STARTS_SUCCEEDED: CheckDefinition(
        "every start came up", "invalidates", "invalidates", "Read the log of the server that did not start."
    ),
    CheckName.ENOUGH_PAIRS: CheckDefinition(
        "enough pairs for an interval", "warns", "warns", "Ask for more pairs: 2 are the least, 6 or more are useful."
    ),
    CheckName.GENERATOR_CPU: CheckDefinition(
        "the load generator was not the limit",
        "invalidates",
        "invalidates",
        "Client-limited: lower the concurrency, choose a smaller payload, or run the generator on another machine.",
    ),
    CheckName.GENERATOR_CEILING: CheckDefinition(
        "the load generator was far from its ceiling",
        "warns",
        "informs",
        "Above half of its ceiling the generator adds to what it measures: spread it with --processes, or measure the "
        "ceiling with `abserve calibrate`.",
    ),
    CheckName.SEND_LAG: CheckDefinition(
        "requests left when they were due",
        "invalidates",
        "warns",
        "Client-limited: lower the rate or give the load generator a core of its own.",
    ),
    CheckName.CONNECTIONS_FREE: CheckDefinition(
        "a connection was free for every request",
        "warns",
        "informs",
        "Allow more --connections; where the arm does not sustain the rate, every number of them is too small.",
    ),
    CheckName.RATE_SUSTAINED: CheckDefinition(
        "both arms sustained the rate",
        "informs",
        "informs",
        "This is a result and no fault: compare latencies at a lower rate, and capacity by the achieved rate.",
    ),
    CheckName.WARM_UP: CheckDefinition(
        "the servers were warm",
        "invalidates",
        "informs",
        "Warm the batch size up for longer: the first requests of a block are slower than the rest.",
    ),
    CheckName.SAME_PAYLOAD_BYTES: CheckDefinition(
        "both arms got requests of the same size",
        "invalidates",
        "warns",
        "Send the same payload to both arms; with different ones this is not a comparison of servers.",
    ),
    CheckName.SAME_MODEL: CheckDefinition("same model", "invalidates", "warns", "Serve the same model on both arms."),
    CheckName.SAME_WEIGHTS: CheckDefinition(
        "same weights", "invalidates", "warns", "Serve the same weights on both arms."
    ),
    CheckName.SAME_PRECISION: CheckDefinition(
        "same precision", "invalidates", "warns", "Give both arms the same precision, or compare precisions on purpose."
    ),
    CheckName.SAME_DEVICE: CheckDefinition(
        "same device",
        "invalidates",
        "warns",
        "Run both arms on the same device; look for an arm that fell back to the CPU.",
    ),
    CheckName.SAME_THREADS: CheckDefinition(
        "same number of threads", "invalidates", "warns", "Give both arms the same number of threads."
    ),
    CheckName.SAME_MAX_BATCH_SIZE: CheckDefinition(
        "same largest batch", "invalidates", "warns", "Give both arms the same maximal batch size."
    ),
    CheckName.SETTINGS_IN_EFFECT: CheckDefinition(
        "settings asked for took effect", "warns", "informs", "Correct the setting, or read why the server overrode it."
    ),
    CheckName.MACHINE_STEADY: CheckDefinition(
        "the machine kept its speed",
        "warns",
        "informs",
        "Close other programs, watch for thermal throttling, and ask for more pairs; the pairing absorbs slow drift.",
    ),
    CheckName.WALL_CLOCK: CheckDefinition(
        "the wall clock ran evenly",
        "informs",
        "informs",
        "The figures stand, they are of the monotonic clock; do not trust the times of day in this run.",
    ),
    CheckName.SERVER_CPU: CheckDefinition(
        "cores were left for the load generator",
        "informs",
        "informs",
        "Give the servers fewer threads, or run the load generator on another machine.",
    ),
    CheckName.BATCHING_FORMED: CheckDefinition(
        "dynamic batching formed batches",
        "informs",
        "informs",
        "Raise the concurrency or the queue delay if batches are wanted.",
    ),
    CheckName.ENGINE_CEILING: CheckDefinition(
        "no arm serves more than its engine does alone",
        "warns",
        "informs",
        "That ceiling was not one: it was measured under other conditions. Let nothing else use the machine and run "
        "again; a server with several instances or two slots calls its engine otherwise than the ceiling does.",
    ),
    CheckName.QUEUE_DELAY: CheckDefinition(
        "serial load did not wait for a batch",
        "informs",
        "informs",
        "Set the queue delay to 0 for serial load: nobody else's request will come.",
    ),
    CheckName.STAGE_ACCOUNT: CheckDefinition(
        "the account of time adds up",
        "informs",
        "informs",
        "Read the stages with care: the server's own times exceed the client's, count other requests, or leave much to "
        "the network, the protocol and the client; --explain shows what the transfer takes.",
    ),
    CheckName.SENSITIVITY: CheckDefinition(
        "the run can see a difference of δ",
        "informs",
        "informs",
        "Ask for more pairs or longer blocks, or quieten the machine, to see smaller differences.",
    ),
    CheckName.RESTARTS: CheckDefinition(
        "the intervals cover restarts of the servers",
        "informs",
        "informs",
        "Ask for --restarts 5 or more: each is a fresh start of both servers with its share of the pairs.",
    ),
    CheckName.NOISE_FLOOR: CheckDefinition(
        "the noise floor of this machine is known",
        "informs",
        "informs",
        "Run `abserve noise-floor` once on this machine: it compares an arm with itself.",
    ),
    CheckName.TRAINED_WEIGHTS: CheckDefinition(
        "trained weights",
        "informs",
        "informs",
        "Speed does not depend on the values of the weights; use --weights with a trained set for meaningful answers.",
    ),
    CheckName.NATIVE_BACKEND: CheckDefinition(
        "Triton runs a native backend",
        "informs",
        "informs",
        "Compare with a Triton container to learn about its onnxruntime and tensorrt backends.",
    ),
    **FAIRNESS_DEFINITIONS,
}
