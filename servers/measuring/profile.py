"""The profile of a loaded engine, batch by batch; taken after every measurement, because CUPTI slows later launches.

On a GPU the engine executes without copies from and to the host where it can (`run_only`), else by `infer`; on a CPU
by `infer`, ONNX Runtime in a second session with its profiler on.

CUPTI watches the process, not torch: it also lists the kernels of ONNX Runtime and TensorRT and those that a CUDA graph
replays. All executions go into one session, because CUPTI loses the first records of every later session of a process.
On a CPU torch's profiler gives the self times of torch's operators, ONNX Runtime's own those of its nodes.

A kernel counts by its main work: a product with GELU in its epilogue is a product. Convolutions are products too, and a
separate softmax is attention, where the served models have most of them.
"""

from __future__ import annotations

import json
import re
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from servers.engines.batches import random_inputs
from servers.engines.interface import Engine, EngineError
from servers.engines.onnxruntime import OnnxRuntimeEngine
from servers.measuring.measurement import EngineTimes
from servers.models.specification import ModelSpecification, reason_of
from servers.protocol.tensors import Array

PRODUCTS = "matrix products"
ATTENTION = "attention"
NORMALISATION = "normalisation"
ELEMENTWISE = "elementwise and activation"
MOVEMENT = "data movement"
OTHER = "other"
CATEGORIES = (PRODUCTS, ATTENTION, NORMALISATION, ELEMENTWISE, MOVEMENT, OTHER)

OWN_KERNELS = {
    "product_kernel": PRODUCTS,
    "attention_kernel": ATTENTION,
    "class_attention_kernel": ATTENTION,
    "row_kernel": NORMALISATION,
    "sum_norm_kernel": NORMALISATION,
    "first_tokens_kernel": NORMALISATION,
    "patches_kernel": MOVEMENT,
    "depthwise_kernel": PRODUCTS,
    "pointwise_kernel": PRODUCTS,
    "epilogue_kernel": ELEMENTWISE,
    "mean_kernel": OTHER,
}
"""The Triton kernels of `servers.engines.torch`: `vit_kernels`, `convolution_kernels`, `layer_kernels`."""

_NORM = r"layer_?norm|rms_?norm|batch_?norm|group_?norm|instance_?norm|normalization"

# The first pattern that matches the lower-case name counts.
_COMPILED = (  # torch.compile's Triton kernels: triton_{kind}_fused_{every operator that went into it}_{number}
    (r"_tem_.*attention", ATTENTION),
    (r"_tem_", PRODUCTS),
    (_NORM, NORMALISATION),
    (r"_(per|red)_.*(softmax|attention)", ATTENTION),
    (r"gelu|relu|sigmoid|tanh|erf|mul|div|add(?!mm)|sub", ELEMENTWISE),
    (r"clone|cat|permute|transpose|slice|select|unbind|constant_pad|convolution|attention", MOVEMENT),
    (r"_poi_", ELEMENTWISE),
)
_KERNELS = (
    (_NORM, NORMALISATION),
    (r"transpose_?(qkv|ctx)|biastranspose", MOVEMENT),  # ONNX Runtime's layouts for attention
    (r"fmha|(?<![a-z])mha|flash|attention|sdpa|softmax", ATTENTION),
    (r"gemm|gemv|gemmk1|splitk|cublas|cutlass|nvjet|xmma|matmul|conv2d|convolve|fprop|winograd|dot_kernel", PRODUCTS),
    (r"copy_kernel|copybroadcast|fillfunctor", MOVEMENT),  # before the elementwise kernel that carries them
    (
        r"element_?wise|pointwise|gelu|relu|silu|sigmoid|tanh|(?<!broad)cast|add_?bias|bias_?add|transform_bias",
        ELEMENTWISE,
    ),
    (r"memcpy|memset|transpose|permute|copy|concat|catarray|slice|split|pad_?kernel|gather|scatter|expand", MOVEMENT),
    (r"_fill|fill_?kernel|reshape|im2col|unfold|nchw|nhwc|index_?select|tensortransform", MOVEMENT),
)
_OPERATORS = (  # torch's (aten::addmm) and ONNX Runtime's (MatMul)
    (_NORM, NORMALISATION),
    (r"attention|softmax", ATTENTION),
    (r"matmul|gemm|conv(?!ert)|addmm|baddbmm|::b?mm$|::linear$|einsum", PRODUCTS),
    (r"copy|clone|contiguous|transpose|permute|view|reshape|reorder|resize|expand|as_strided|::t$|::to$", MOVEMENT),
    (r"cat$|concat|slice|split|select|squeeze|gather|scatter|chunk|narrow|unbind|flatten|pad$|tile|shape", MOVEMENT),
    (r"empty|zeros|fill|constant|identity|detach|resolve_|range", MOVEMENT),
    (r"gelu|relu|sigmoid|tanh|erf|add|sub|mul|div|sqrt|pow|cast|clamp|where|equal|exp|neg|transform_bias", ELEMENTWISE),
)


def kernel_category(name: str) -> str:
    """The category of a CUDA kernel, copy or fill, by CUPTI's full name."""
    return OWN_KERNELS.get(name) or _first(_COMPILED if name.startswith("triton_") else _KERNELS, name)


def operator_category(name: str) -> str:
    """The category of an operator of torch or ONNX Runtime on a CPU."""
    return _first(_OPERATORS, name)


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    lower = name.lower()
    return next((category for pattern, category in rules if re.search(pattern, lower)), OTHER)


_WRAPPERS = {"Kernel", "Kernel2", "device_kernel", "kernel"}
"""Kernels named by their template argument, as in CUTLASS."""

_PLAIN_TYPES = re.compile(
    r"(const |unsigned |signed )*(void|bool|true|false|char|short|int|long|float|double|half|half2|__half|__half2"
    r"|__nv_bfloat16|nv_bfloat16|Half|BFloat16|half_t|bfloat16_t|u?int\d+_t|MLFloat16)( const| long| int|[*&])*"
)


def kernel_label(name: str) -> str:
    """A C++ kernel without namespaces, parameters and most template arguments. An argument that identifies the function
    stays: `vectorized_elementwise_kernel<GeluCUDAKernelImpl>`."""
    bare = name.removeprefix("void ").replace("(anonymous namespace)::", "").replace("<unnamed>::", "")
    if bare.startswith(("Memcpy", "Memset")):
        return bare
    signature = next(_parts(bare, "("), bare)
    head = next(_parts(signature, "<"), signature)
    base = head.rpartition("::")[2].strip()
    if len(head) == len(signature):
        return base
    telling = next(filter(None, map(_telling, _arguments(signature, head))), None)
    if telling is None:
        return base
    return telling if base in _WRAPPERS else f"{base}<{next(_parts(telling, '<'))}>"


def _arguments(signature: str, head: str) -> Iterator[str]:
    return _parts(signature[len(head) + 1 : signature.rfind(">")], ",")


def _telling(argument: str) -> str | None:
    """The label of a template argument; None for numbers, plain types and containers of them."""
    signature = next(_parts(argument.strip(), "("), "")
    head = next(_parts(signature, "<"), "").strip()
    last = head.rpartition("::")[2]
    if not re.fullmatch(r"[A-Za-z_]\w*", last) or _PLAIN_TYPES.fullmatch(last) or head.startswith("std::"):
        return None
    if last.startswith("gpu_kernel_impl"):  # torch's launcher of elementwise kernels: its argument is the function
        return next(filter(None, map(_telling, _arguments(signature, head))), last)
    return kernel_label(signature)


def _parts(text: str, separator: str) -> Iterator[str]:
    """The pieces of `text` between separators outside all brackets."""
    depth = start = 0
    for index, character in enumerate(text):
        if character == separator and depth == 0:
            yield text[start:index]
            start = index + 1
        if character in "<({[":
            depth += 1
        elif character in ">)}]" and text[index - 1 : index + 1] != "->":
            depth -= 1
    yield text[start:]


IDLE_ON_DEVICE = "idle between kernels"
IDLE_ON_HOST = "outside operators"
EXECUTIONS_ON_DEVICE, EXECUTIONS_ON_HOST = 20, 5
MARK = "spin_kernel"
"""Part of the name of the kernel that `torch.cuda._sleep` launches."""
MARK_CYCLES = 2000
LEADING_MARKS = 32
"""Marks before the first execution, for CUPTI to lose: one more with every earlier session of the process."""

TOP_KERNELS = 10
LABEL_WIDTH, CELL_WIDTH = 30, 18
"""Columns of the table of categories; a narrow terminal gets several tables."""


@dataclass(slots=True)
class ProfileTotals:
    """The sums over all executions of one batch size, by kernel or by operator; `span_ns` adds up their spans."""

    counts: Counter[str] = field(default_factory=Counter)
    busy_ns: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    span_ns: float = 0.0
    with_copies: bool = False

    def add(self, launches: Sequence[KernelLaunch], span_ns: float) -> None:
        """Add launches: the times added are the length of the union of all intervals. An instant in which n launches
        run counts 1/n for each."""
        self.span_ns += span_ns
        edges = []
        for index, launch in enumerate(launches):
            self.counts[launch.name] += 1
            edges += [(launch.start_ns, 0, index), (launch.end_ns, 1, index)]
        running: set[int] = set()
        before_ns = 0
        for at_ns, is_end, index in sorted(edges):
            for other in running:
                self.busy_ns[launches[other].name] += (at_ns - before_ns) / len(running)
            before_ns = at_ns
            if is_end:
                running.discard(index)
            else:
                running.add(index)


def summarised(part: ProfileTotals, batch: int, measured_us: float, *, on_device: bool) -> dict[str, Any]:
    """The entry of one batch size in the document of `abserve engine`, per execution. Raises `EngineError` if its
    executions took no time.

    The span is from the start of an execution's first kernel to the end of its last, on a CPU the execution by the
    host's clock. `idle_us` is the rest of the span; it is also the last of the categories, whose shares add up to 1.
    Time in which several kernels run is divided equally among them. A kernel counts for all its launches, on a CPU an
    operator for all its calls. `measured_us` was measured before, without a profiler: the execution, or the call of an
    engine that does not measure executions. `with_copies`: the executions include the copies from and to the host.
    """
    executions = EXECUTIONS_ON_DEVICE if on_device else EXECUTIONS_ON_HOST
    idle_name = IDLE_ON_DEVICE if on_device else IDLE_ON_HOST
    busy_ns = sum(part.busy_ns.values())
    span_ns = max(part.span_ns, busy_ns)  # a clock of whole µs may make the parts longer than the whole
    if not span_ns:
        raise EngineError(f"the profile of batch {batch} contains no time")
    by_category: dict[str, float] = defaultdict(float)
    kernels = []
    for name, count in part.counts.items():
        of_kernel_ns = part.busy_ns.get(name, 0.0)
        category = kernel_category(name) if on_device else operator_category(name)
        by_category[category] += of_kernel_ns
        kernels.append(
            {
                "name": name,
                "label": kernel_label(name) if on_device else name,
                "category": category,
                "count": count / executions,
                "us": of_kernel_ns / executions / 1e3,
                "share": of_kernel_ns / span_ns,
            }
        )
    by_category[idle_name] = span_ns - busy_ns
    return {
        "batch": batch,
        "executions": executions,
        "with_copies": part.with_copies,
        "measured_us": measured_us,
        "span_us": span_ns / executions / 1e3,
        "idle_us": (span_ns - busy_ns) / executions / 1e3,
        "launches": sum(kernel["count"] for kernel in kernels),
        "categories": [
            {"name": name, "us": by_category[name] / executions / 1e3, "share": by_category[name] / span_ns}
            for name in (*CATEGORIES, idle_name)
        ],
        "kernels": sorted(kernels, key=lambda kernel: -kernel["us"]),
    }


def profile_engine(
    engine: Engine, specification: ModelSpecification, measured: Sequence[EngineTimes]
) -> list[dict[str, Any]] | str:
    """Profile a loaded engine at every measured batch size, each measured once; measure nothing in this process later.
    The reason in its place for an engine that cannot be profiled, whose measurement is valid all the same."""
    batches = [(times.batch, times.reference.sizes) for times in measured]
    effective = engine.describe()
    on_device = effective.device != "cpu"
    try:
        if on_device:
            parts = _on_device(engine, specification, effective.device, batches)
        elif isinstance(engine, OnnxRuntimeEngine):
            parts = [_nodes(engine, batch, sizes) for batch, sizes in batches]
        elif effective.kind == "torch":
            parts = [
                _torch_operators(engine, random_inputs(specification, batch, 0, sizes)) for batch, sizes in batches
            ]
        else:
            return f"there is no profiler for the {effective.kind} engine on a CPU"
        return [
            summarised(part, times.batch, round(times.best_ns) / 1e3, on_device=on_device)
            for part, times in zip(parts, measured, strict=True)
        ]
    except EngineError as exc:
        return str(exc)


def _on_device(
    engine: Engine, specification: ModelSpecification, device: str, batches: Sequence[tuple[int, Mapping[str, int]]]
) -> list[ProfileTotals]:
    calls: list[Callable[[], object]] = []
    with_copies: list[bool] = []
    for batch, sizes in batches:
        engine.infer(inputs := random_inputs(specification, batch, 0, sizes))
        execute: Callable[[], object] = partial(engine.infer, inputs)
        if without_copies := engine.run_only(batch):
            execute = partial(engine.run_only, batch)
        with_copies.append(not without_copies)
        calls += [execute] * EXECUTIONS_ON_DEVICE
    groups = device_launches(calls, device)
    parts = []
    for number, copies in enumerate(with_copies):
        part = ProfileTotals(with_copies=copies)
        for launches in groups[number * EXECUTIONS_ON_DEVICE :][:EXECUTIONS_ON_DEVICE]:
            part.add(launches, span_ns(launches))
        parts.append(part)
    return parts


def _torch_operators(engine: Engine, inputs: Mapping[str, Array]) -> ProfileTotals:
    """Self times of torch's operators, without the operators that they call, and the host's time."""
    from torch.profiler import ProfilerActivity, profile

    engine.infer(inputs)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started_ns = time.perf_counter_ns()
        for _ in range(EXECUTIONS_ON_HOST):
            engine.infer(inputs)
        span_ns = time.perf_counter_ns() - started_ns
    events = [event for event in profiler.key_averages() if event.count]
    if not events:
        raise EngineError("torch's profiler reports no operator, so there is no profile")
    busy_ns = {event.key: event.self_cpu_time_total * 1e3 for event in events}
    return ProfileTotals(Counter({event.key: event.count for event in events}), busy_ns, span_ns)


def _nodes(engine: OnnxRuntimeEngine, batch: int, sizes: Mapping[str, int]) -> ProfileTotals:
    """Node times by operator in the last runs of ONNX Runtime's profile, and the time of those runs."""
    with TemporaryDirectory(prefix="abserve-profile-") as folder:
        try:
            path = engine.node_profile(Path(folder), batch, EXECUTIONS_ON_HOST + 1, sizes)  # the first one allocates
        except Exception as exc:  # ORT's exceptions share no base but Exception
            reason = reason_of(exc)
            raise EngineError(f"ONNX Runtime cannot execute batch {batch} with its profiler on: {reason}") from exc
        events = json.loads(path.read_text())
    nodes: list[KernelLaunch] = []
    runs: list[KernelLaunch] = []
    for event in events:
        start_ns = int(event["ts"]) * 1000
        end_ns = start_ns + int(event.get("dur", 0)) * 1000
        if event["name"] == "model_run":
            runs.append(KernelLaunch("model_run", start_ns, end_ns))
        elif event.get("cat") == "Node" and event["name"].endswith("_kernel_time"):
            nodes.append(KernelLaunch(event["args"]["op_name"], start_ns, end_ns))
    runs = sorted(runs, key=lambda run: run.start_ns)[-EXECUTIONS_ON_HOST:]
    if len(runs) < EXECUTIONS_ON_HOST or not nodes:
        raise EngineError("ONNX Runtime's profile names no node, so there is no profile")
    part = ProfileTotals()
    part.add([node for node in nodes if node.start_ns >= runs[0].start_ns], sum(map(span_ns, ([run] for run in runs))))
    return part


class KernelLaunch(NamedTuple):
    """One kernel, copy or fill, or one operator on a CPU; ns on any clock."""

    name: str
    start_ns: int
    end_ns: int


def span_ns(launches: Sequence[KernelLaunch]) -> int:
    """From the first start to the last end."""
    return max(launch.end_ns for launch in launches) - min(launch.start_ns for launch in launches)


def device_launches(executions: Sequence[Callable[[], object]], device: str) -> list[list[KernelLaunch]]:
    """The launches of each of `executions`; a short spinning kernel of torch marks where one ends. `device` is cuda:N.
    Raises `EngineError` where CUPTI reports nothing, or not every execution."""
    try:
        import torch
        from torch.profiler import ProfilerActivity, profile
    except ImportError as exc:
        raise EngineError("kernels are read through torch's profiler, and torch is not installed") from exc

    def mark() -> None:
        torch.cuda.synchronize()
        torch.cuda._sleep(MARK_CYCLES)  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    index = torch.device(device).index or 0
    try:
        with torch.cuda.device(index), profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for _ in range(LEADING_MARKS):
                mark()
            for execute in executions:
                execute()
                mark()
        events = list(profiler.events() or ())
    except RuntimeError as exc:
        raise EngineError(f"torch's profiler failed: {reason_of(exc)}") from exc
    launches = [
        KernelLaunch(event.name, round(event.time_range.start * 1e3), round(event.time_range.end * 1e3))
        for event in events
        if event.device_type.name == "CUDA" and event.device_index == index
    ]
    return split(launches, len(executions))


def split(launches: Iterable[KernelLaunch], executions: int) -> list[list[KernelLaunch]]:
    """The launches of each execution, which are those between two marks. Raises `EngineError` if some are missing."""
    groups: list[list[KernelLaunch]] = []
    for launch in sorted(launches, key=lambda launch: launch.start_ns):
        if MARK in launch.name:
            groups.append([])
        elif groups:
            groups[-1].append(launch)
    complete = [group for group in groups[:-1] if group]  # the last mark ends the last execution
    if not groups:
        raise EngineError(
            "torch's profiler reports no kernel, so there is no profile: the driver may let only administrators "
            "profile (run as root, or load nvidia with NVreg_RestrictProfilingToAdminUsers=0), or another profiler is "
            "attached"
        )
    if len(complete) != executions:
        raise EngineError(
            f"torch's profiler reports {len(complete)} of {executions} executions; profile fewer batch sizes at a time "
            "(--batches)"
        )
    return complete


def show_profile(console: Console, profiles: Sequence[dict[str, Any]] | str) -> None:
    """Print µs per execution by category and batch, and the kernels of the first and the last batch; or why not."""
    if isinstance(profiles, str):
        console.print(f"no profile: {profiles}", markup=False)
        return
    on_device = profiles[0]["categories"][-1]["name"] == IDLE_ON_DEVICE
    copies = ", copies from and to the host included" if any(batch["with_copies"] for batch in profiles) else ""
    console.print(
        f"profile: µs per execution (share of the span), means over {profiles[0]['executions']} executions under a "
        f"profiler, which slows them{copies}",
        markup=False,
    )
    columns = max(1, (console.width - LABEL_WIDTH) // CELL_WIDTH)
    for start in range(0, len(profiles), columns):
        console.print(_categories(profiles[start : start + columns], "launches" if on_device else "operators"))
    for batch in {batch["batch"]: batch for batch in (profiles[0], profiles[-1])}.values():
        console.print(_kernels(batch, "kernel" if on_device else "operator"))


def _categories(profiles: Sequence[dict[str, Any]], unit: str) -> Table:
    table = Table(box=SIMPLE)
    table.add_column("batch", no_wrap=True)
    for profile in profiles:
        table.add_column(str(profile["batch"]), justify="right", no_wrap=True)
    for row, category in enumerate(profiles[0]["categories"]):
        times = [profile["categories"][row] for profile in profiles]
        table.add_row(category["name"], *(f"{time['us']:,.1f} ({time['share']:.0%})" for time in times))
    table.add_section()
    table.add_row("span under the profiler", *(f"{profile['span_us']:,.1f}" for profile in profiles))
    table.add_row("measured without it", *(f"{profile['measured_us']:,.1f}" for profile in profiles))
    table.add_row(unit, *(f"{profile['launches']:g}" for profile in profiles))
    return table


def _kernels(profile: dict[str, Any], unit: str) -> Table:
    merged: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    for kernel in profile["kernels"]:
        row = merged[kernel["label"], kernel["category"]]
        for place, value in enumerate((kernel["count"], kernel["us"], kernel["share"])):
            row[place] += value
    ranked = sorted(merged.items(), key=lambda item: -item[1][1])
    table = Table(box=SIMPLE)
    table.add_column(f"batch {profile['batch']}: {unit}", overflow="fold")
    table.add_column("category", no_wrap=True)
    for name in ("count", "µs", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for (label, category), (count, us, share) in ranked[:TOP_KERNELS]:
        table.add_row(label, category, f"{count:g}", f"{us:,.1f}", f"{share:.1%}")
    if rest := ranked[TOP_KERNELS:]:
        count, us, share = (sum(values[place] for _, values in rest) for place in range(3))
        table.add_row(f"{len(rest)} more", "", f"{count:g}", f"{us:,.1f}", f"{share:.1%}")
    return table
