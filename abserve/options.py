"""The options of `abserve compare` as keyword arguments. Made from the code by `make reference`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Literal, TypedDict

REPEATED = ("fail_if",)
"""Options that are given once per value; other lists are written with commas."""


class CompareOptions(TypedDict, total=False):
    """None is an option that is not given. Arms B to H have the options of A."""

    a: str | PathLike[str] | None
    """Server of arm A: native, triton, fastapi, litserve, vllm or the URL of a running server."""
    a_option: Mapping[str, object] | None
    """Set an option of `abserve serve` for arm A; repeatable."""
    b: str | PathLike[str] | None
    model: str | PathLike[str] | None
    """Model: SOURCE:NAME (see `abserve models`), a file or folder, or the name on the URLs."""
    transport: str | float | Sequence[str | float] | None
    """http, grpc or shm (default: http); several run one comparison each. Of a language model completions or
    generate_stream (default: the first of these that all arms speak)."""
    inputs: str | PathLike[str] | None
    """Your inputs: DIR (JPEG or raw files), FILE.npz, perf_analyzer's FILE.json, FILE.jsonl, or random."""
    scenarios: str | float | Sequence[str | float] | None
    """Choose from cold-start, single, batched, concurrent, open (see --rates), traffic and slo (see --slo-p99-ms); of a
    language model from cold-start, single, concurrent, long-prompt, long-answer, open, traffic, goodput and shared-
    prefix (default: single, concurrent)."""
    preset: Literal["smoke", "quick", "full"] | None
    """smoke: 1 minute for two arms, to see that everything works; quick: 5; full: 25, and up to 10 more for
    --explain."""
    explain: bool | None
    """Find out why the arms differ by ablations (default: with --preset full)."""
    out: str | PathLike[str] | None
    """Folder for the results (default: results/TIME-MODEL)."""
    a_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    """Send arm A another payload; then no winner is named."""
    a_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    """Protocol of arm A, if it serves a language model and the arms have none in common."""
    a_body: Mapping[str, object] | None
    """Add or replace a field of the requests to the language model of arm A (KEY=VALUE, JSON or text), or leave one out
    (-KEY); repeatable."""
    a_grpc: str | PathLike[str] | None
    """gRPC address of arm A, if its target is a URL: HOST:PORT, or grpcs://HOST:PORT with TLS."""
    a_model: str | PathLike[str] | None
    """Another model for arm A, or its name on the server at a URL."""
    a_version: str | PathLike[str] | None
    """Model version on arm A, if its target is a URL."""
    a_header: Mapping[str, object] | None
    """Send a header, or gRPC metadata, to arm A if its target is a URL; the value may be $VARIABLE or 'Bearer
    $VARIABLE' and is never stored; repeatable."""
    a_ca: str | PathLike[str] | None
    """Trust the CA certificates in this PEM file for arm A (TLS)."""
    a_insecure: bool | None
    """Do not verify the TLS certificate of arm A."""
    a_cert: str | PathLike[str] | None
    """Client certificate for arm A, a PEM file (TLS)."""
    a_key: str | PathLike[str] | None
    """Key of that certificate, if it is in another PEM file."""
    b_option: Mapping[str, object] | None
    b_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    b_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    b_body: Mapping[str, object] | None
    b_grpc: str | PathLike[str] | None
    b_model: str | PathLike[str] | None
    b_version: str | PathLike[str] | None
    b_header: Mapping[str, object] | None
    b_ca: str | PathLike[str] | None
    b_insecure: bool | None
    b_cert: str | PathLike[str] | None
    b_key: str | PathLike[str] | None
    c: str | PathLike[str] | None
    c_option: Mapping[str, object] | None
    c_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    c_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    c_body: Mapping[str, object] | None
    c_grpc: str | PathLike[str] | None
    c_model: str | PathLike[str] | None
    c_version: str | PathLike[str] | None
    c_header: Mapping[str, object] | None
    c_ca: str | PathLike[str] | None
    c_insecure: bool | None
    c_cert: str | PathLike[str] | None
    c_key: str | PathLike[str] | None
    d: str | PathLike[str] | None
    d_option: Mapping[str, object] | None
    d_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    d_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    d_body: Mapping[str, object] | None
    d_grpc: str | PathLike[str] | None
    d_model: str | PathLike[str] | None
    d_version: str | PathLike[str] | None
    d_header: Mapping[str, object] | None
    d_ca: str | PathLike[str] | None
    d_insecure: bool | None
    d_cert: str | PathLike[str] | None
    d_key: str | PathLike[str] | None
    e: str | PathLike[str] | None
    e_option: Mapping[str, object] | None
    e_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    e_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    e_body: Mapping[str, object] | None
    e_grpc: str | PathLike[str] | None
    e_model: str | PathLike[str] | None
    e_version: str | PathLike[str] | None
    e_header: Mapping[str, object] | None
    e_ca: str | PathLike[str] | None
    e_insecure: bool | None
    e_cert: str | PathLike[str] | None
    e_key: str | PathLike[str] | None
    f: str | PathLike[str] | None
    f_option: Mapping[str, object] | None
    f_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    f_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    f_body: Mapping[str, object] | None
    f_grpc: str | PathLike[str] | None
    f_model: str | PathLike[str] | None
    f_version: str | PathLike[str] | None
    f_header: Mapping[str, object] | None
    f_ca: str | PathLike[str] | None
    f_insecure: bool | None
    f_cert: str | PathLike[str] | None
    f_key: str | PathLike[str] | None
    g: str | PathLike[str] | None
    g_option: Mapping[str, object] | None
    g_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    g_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    g_body: Mapping[str, object] | None
    g_grpc: str | PathLike[str] | None
    g_model: str | PathLike[str] | None
    g_version: str | PathLike[str] | None
    g_header: Mapping[str, object] | None
    g_ca: str | PathLike[str] | None
    g_insecure: bool | None
    g_cert: str | PathLike[str] | None
    g_key: str | PathLike[str] | None
    h: str | PathLike[str] | None
    h_option: Mapping[str, object] | None
    h_payload: Literal["tensors", "fp32", "uint8", "jpeg"] | None
    h_transport: Literal["completions", "generate_stream", "text", "chat"] | None
    h_body: Mapping[str, object] | None
    h_grpc: str | PathLike[str] | None
    h_model: str | PathLike[str] | None
    h_version: str | PathLike[str] | None
    h_header: Mapping[str, object] | None
    h_ca: str | PathLike[str] | None
    h_insecure: bool | None
    h_cert: str | PathLike[str] | None
    h_key: str | PathLike[str] | None
    weights: str | PathLike[str] | None
    """random:SEED, a pretrained tag or a checkpoint file (default: the model's)."""
    precision: Literal["fp32", "tf32", "fp16"] | None
    """Precision of all arms that have no such option (default: fp16 on a GPU, fp32 on a CPU)."""
    tritonserver: str | PathLike[str] | None
    """Folder of an installed tritonserver for the arms triton (default: on PATH or in /opt/tritonserver, else the
    wheel's)."""
    backend: Literal["auto", "tensorrt", "onnxruntime", "python"] | None
    """Triton's backend (default: auto, the first of these that is installed and has its file)."""
    triton_repository: str | PathLike[str] | None
    """Your own model repository for the arms triton, served unchanged."""
    pad_to: str | PathLike[str] | None
    """Pad batches of different lengths to these sizes, or none (default: 32,64,128,256,512 for text, if every arm
    can)."""
    threads: int | None
    """Engine threads of each server; 0 uses all cores."""
    matrix: bool | None
    """Run every transport with every payload."""
    deployment: Literal["embedded", "compose"] | None
    """embedded starts the servers; compose uses the running Docker Compose stack."""
    compose_project: str | PathLike[str] | None
    """Name of that stack (default: abserve)."""
    tls: bool | None
    """Reach the servers that abserve starts over TLS, with a certificate made for the run."""
    payload: str | float | Sequence[str | float] | None
    """fp32, uint8 or jpeg for images (default: fp32), tensors for other models; several run one comparison each."""
    sequence_length: str | PathLike[str] | None
    """Length of the inputs of a model of text: text (the default), N, or with --surface a list."""
    surface: bool | None
    """Map which arm is best over users × batch sizes (--concurrency 16: 1, 2, 4, 8, 16), or lengths (--sequence-length)
    or prompts (--prompt-tokens); rounds go to where the winner is uncertain."""
    batch_sizes: str | float | Sequence[str | float] | None
    """Batch sizes of the scenario batched (8 with --preset smoke) and of --surface (1,8); servers that are started
    accept at least the largest."""
    concurrency: str | float | Sequence[str | float] | None
    """Numbers of users of the scenario concurrent (4, 16 and on a GPU 64 of a language model; 4 with --preset
    smoke)."""
    prompt_tokens: str | float | Sequence[str | float] | None
    """Tokens per prompt of a language model (default: 32, on a GPU 128 or 256; long-prompt: 2048); a list with
    --surface."""
    output_tokens: int | None
    """Tokens per answer of a language model (default: 64, on a GPU 128 or 256, with --preset smoke 32; long-answer:
    1024)."""
    limits: str | PathLike[str] | None
    """Limits of a good answer of a language model, for goodput: ttft=200ms,tpot=50ms,gap=1s. With --traffic search the
    highest speed that keeps them, or p99=50ms of tensors."""
    price: float | None
    """Price of the machine per hour, for the cost of a language model's tokens."""
    requests: int | None
    """Fewest requests per block of the scenario concurrent."""
    rates: str | float | Sequence[str | float] | None
    """Open loop: send this many requests/s whatever the server does; one workload per rate."""
    traffic: str | PathLike[str] | None
    """Replay windows of --open-seconds of the traffic in this folder of `abserve record`, HAR file, trace of AIPerf or
    data of perf_analyzer; of a trace with lengths alone, as Mooncake's, the first --open-seconds with made-up
    prompts."""
    speed: str | float | Sequence[str | float] | None
    """Replay it so many times as fast, as in 1,2,4: one workload per speed (default: 1)."""
    check_answers: bool | None
    """Compare the answers with those of `abserve record --answers`, before the load and under it."""
    arrivals: Literal["poisson", "constant"] | None
    """Gaps between open-loop requests: poisson (independent clients) or constant."""
    connections: int | None
    """Most connections of an open loop; a request without one waits."""
    open_seconds: float | None
    """Seconds per block of an open loop."""
    slo_p99_ms: str | float | Sequence[str | float] | None
    """Search the highest Poisson rate whose p99 stays within this many ms."""
    slo_queries: int | None
    """Fewest requests per trial of that search (default: 459 smoke, 838 quick, 2010 full)."""
    processes: int | None
    """Processes of the load generator, which share users or rate; 0: as many as it needs."""
    best: bool | None
    """Compare every server at its best for each load: a third of --minutes chooses settings such as Triton's instances,
    the rest measures the chosen ones afresh."""
    minutes: float | None
    """Minutes of the comparison, for as many rounds as fit (default: the preset's)."""
    rounds: int | None
    """Rounds per workload, in place of --minutes; with --until decided the fewest."""
    restarts: int | None
    """Spread the rounds over this many server starts; from 5 on the intervals cover restarts."""
    until: Literal["planned", "decided"] | None
    """decided adds rounds until every scenario has a verdict."""
    time_limit: float | None
    """Most minutes of load with --until decided."""
    request_timeout: float | None
    """Seconds after which a request counts as failed; of a streamed answer, seconds in which the server sends
    nothing."""
    seed: int | None
    """Seed for the order of the blocks, the inputs and the arrivals."""
    margin: float | None
    """A difference within this share counts as no meaningful difference."""
    gpu_control: bool | None
    """With a GPU, also run one arm on the CPU to prove that the GPU verification notices it."""
    strict: bool | None
    """Wait up to a minute for a quiet machine, and call a run that others disturbed INVALID. Without it such a run is
    ROUGH: its intervals include what the others took, and its figures are not to be cited."""
    handicap_check: bool | None
    """Compare each arm that abserve starts with the same server at its own defaults; a slower one makes the run
    INVALID. Without it the arms are compared as configured."""
    explain_minutes: float | None
    """Most minutes for the ablations of --explain."""
    ceiling: bool | None
    """Measure each engine alone, without its server (default: with --preset full)."""
    fail_if: str | Sequence[str] | None
    """Exit with status 3 if this holds, such as 'ratio.p99.low > 1.05'; repeatable."""
    anyway: bool | None
    """With --strict: measure although other programs use the CPU, instead of waiting up to a minute for them and giving
    up."""
    junit: str | PathLike[str] | None
    """Also write JUnit XML for CI."""
    csv: str | PathLike[str] | None
    """Also write the comparisons as CSV, and the blocks to FILE-blocks.csv."""
    mlflow: str | PathLike[str] | None
    """Also export to MLflow: the address of a server, a folder or sqlite:///FILE."""
    resume: str | PathLike[str] | None
    """Go on with an interrupted comparison with --best: what is chosen stays, the rest is measured."""
    verbose: bool | None
    """Show what each server at a URL answered when its model was looked for."""
