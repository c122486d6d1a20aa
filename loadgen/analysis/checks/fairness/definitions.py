"""What the checks before a load mean: title, severity, severity when unknown, remedy."""

from __future__ import annotations

from loadgen.analysis.checks.names import CheckDefinition, CheckName

FAIRNESS_DEFINITIONS: dict[CheckName, CheckDefinition] = {
    CheckName.SAME_QUEUE_DELAY: CheckDefinition(
        "same queue delay", "warns", "informs", "Give both arms the same queue delay, or compare delays on purpose."
    ),
    CheckName.SAME_INSTANCES: CheckDefinition(
        "same number of instances", "warns", "informs", "Give both arms as many instances, or compare them on purpose."
    ),
    CheckName.BATCH_LIMIT: CheckDefinition(
        "no batch is beyond an arm's limit",
        "warns",
        "informs",
        "Ask for smaller batches, or raise the arm's max-batch-size.",
    ),
    CheckName.SERIAL_QUEUE_DELAY: CheckDefinition(
        "serial load meets no queue delay",
        "informs",
        "informs",
        "Set max-queue-delay-us to 0 for serial load, on both arms alike, or read these scenarios with it in mind.",
    ),
    CheckName.TF32: CheckDefinition(
        "FP32 is FP32",
        "warns",
        "informs",
        'Set use_tf32 to "0" in the cuda accelerator of the configuration, or ask both arms for tf32.',
    ),
    CheckName.MODEL_WARM_UP: CheckDefinition(
        "the models warm themselves",
        "informs",
        "informs",
        "Add model_warmup for every batch size. The load is warmed by us before it begins, a cold start is not.",
    ),
    CheckName.METRICS: CheckDefinition(
        "no metrics that cost time",
        "warns",
        "informs",
        "Start Triton without summary_latencies (reported to cost a third of the throughput), tracing, verbose logs.",
    ),
    CheckName.RESPONSE_CACHE: CheckDefinition(
        "no answer comes from a cache",
        "warns",
        "informs",
        "Set response_cache { enable: false }: requests repeat, and a cached answer is no inference.",
    ),
    CheckName.CUDA_GRAPHS: CheckDefinition(
        "CUDA graphs take effect where they are asked for",
        "warns",
        "informs",
        "Take the setting out: only Triton's tensorrt backend reads it, and enable_cuda_graph is unsafe in Triton.",
    ),
    CheckName.GRAPH_SIZES: CheckDefinition(
        "every batch size has its CUDA graph",
        "warns",
        "informs",
        "Add a graph_spec for each batch size, or a graph_lower_bound that covers it.",
    ),
    CheckName.PREFERRED_SIZES: CheckDefinition(
        "no preferred batch sizes without a profile",
        "informs",
        "informs",
        "Leave preferred_batch_size out, as Triton advises, unless each size has a TensorRT profile of its own.",
    ),
    CheckName.CORES: CheckDefinition(
        "the engines' threads fit the cores",
        "warns",
        "informs",
        "Ask for fewer --threads or instances: threads that share a core wait for each other.",
    ),
    CheckName.CLIENT_DISTANCE: CheckDefinition(
        "both arms are equally near",
        "warns",
        "informs",
        "Run the load generator on the servers' machine or on their network; both arms equally far away.",
    ),
    CheckName.MACHINE_IDLE: CheckDefinition(
        "nothing else kept the processors busy",
        "warns",
        "informs",
        "End what else runs on this machine; pairing absorbs a steady load, and a changing one widens the intervals.",
    ),
    CheckName.CPU_GOVERNOR: CheckDefinition(
        "the processors keep their clocks",
        "informs",
        "informs",
        "Set the governor to performance: cpupower frequency-set -g performance.",
    ),
    CheckName.GPU_EXCLUSIVE: CheckDefinition(
        "nobody else uses the GPU", "warns", "informs", "End the other processes, or measure on a GPU of your own."
    ),
    CheckName.GPU_IDLE: CheckDefinition(
        "the GPU was idle before the load",
        "warns",
        "informs",
        "Find out what keeps the GPU busy: an arm that spins, or another container.",
    ),
    CheckName.GPU_CLOCKS: CheckDefinition(
        "nothing slows the GPU down",
        "warns",
        "informs",
        "Cool the machine, raise the power limit, or lock lower clocks that it can hold: nvidia-smi -lgc.",
    ),
}
