"""One step of a decoder on a GPU: Triton kernels and cuBLAS in one CUDA graph for each size of a step.

The size of a step is its rows and its tokens of prompts, each rounded up to a bucket. What differs between steps of one
size (positions, slots, tokens of prompts, whose token is chosen) is one array of integers that the host copies before
the replay. A step without prompts has two forms, of fused kernels for few rows and of cuBLAS's products; `warm_up`
measures both and keeps the faster one of each size. Its measurements also say how many tokens of prompts a step of so
many rows should take.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import cycle, pairwise
from pathlib import Path
from typing import Any

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor
from torch.nn import functional

from servers.engines.choice import ChoiceCache, digest, machine_key, makes_choices
from servers.engines.settings import EngineError
from servers.language import decoder_kernels as kernels
from servers.language.decoder import Affine, DecoderWeights, LayerWeights
from servers.language.forward import StepPlan, TensorSlots

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
"""Buckets of rows that decode."""
SMALL_CHUNK = 32
CHUNKS = (128, 256, 512)
"""Buckets of the tokens of prompts beside decoding rows, where their number is not given."""
LONGEST_STEP = 2.0
"""Times as long as a step without prompts may one with prompts be: each running answer waits for it."""
LONGEST_PIECE = 1.25
"""Times as long as the shortest step with prompts it may be at any rate: of a mixture that one reads all experts."""
LEAST_HEAD = 16
"""The fewest values that Triton multiplies at once."""
LEAST_TILE = 32
QUERIES = 16
"""Tokens of one prompt that a program of the attention takes: pieces of prompts begin at multiples of it."""
MOST_PIECES = 8
MOST_FUSED_ROWS = 16
PROGRAMS = 264
"""Programs that fill a GPU: two on each of an H100's 132 multiprocessors."""
MOST_SPLITS = 64
TIMED_REPLAYS, TIMED_MS = 20, 30.0


@dataclass(frozen=True, slots=True)
class StepSize:
    """The buckets of one graph. Tokens are flat: rows first, then those of prompts."""

    rows: int
    chunk: int

    @property
    def tokens(self) -> int:
        return self.rows + self.chunk

    @property
    def chosen(self) -> int:
        """Rows of the last product: those that decode, and the last token of each prompt."""
        return self.rows + (MOST_PIECES if self.chunk else 0)

    @property
    def integers(self) -> int:
        return 2 * self.tokens + self.chunk + 2 * self.chosen


@dataclass(frozen=True, slots=True)
class _StepIntegers:
    """The parts of the array that differs between steps, for one size; on the device or on the host."""

    positions: Any
    slots: Any
    ids: Any
    picks: Any
    """The flat number of each token whose successor is chosen."""
    targets: Any
    """The slot whose next token that is; negative: nobody's."""

    @classmethod
    def of(cls, array: Any, size: StepSize) -> _StepIntegers:
        parts, end = [], 0
        for length in (size.tokens, size.tokens, size.chunk, size.chosen, size.chosen):
            parts.append(array[end : end + length])
            end += length
        return cls(*parts)


class TritonForward(TensorSlots):
    """See this module. `chunk` and `largest_chunk`: the most tokens of prompts beside running answers, and without any.
    With `chunk` 0 `warm_up` measures how many a step of so many rows should take."""

    alignment = QUERIES

    def __init__(
        self,
        weights: DecoderWeights,
        slots: int,
        max_length: int,
        chunk: int,
        largest_chunk: int,
        *,
        graphs: bool = True,
    ) -> None:
        """Without `graphs` every step launches its kernels, also in Triton's interpreter on a CPU. Raises `EngineError`
        for a model that the kernels do not know."""
        head_size = weights.shape.head_size
        if head_size < LEAST_HEAD or head_size != triton.next_power_of_2(head_size):
            raise EngineError(
                f"the slots engine has no kernels for heads of {head_size} values, only for {LEAST_HEAD}, 32, 64 and "
                "further powers of two; use --engine continuous"
            )
        super().__init__(weights, slots, max_length)
        shape, device, dtype = weights.shape, self.device, self.dtype
        self.most_pieces = MOST_PIECES
        self._graphs_wanted = graphs
        self._row_buckets = (*(rows for rows in ROWS if rows < slots), slots)
        self._measures_chunks = graphs and not chunk and makes_choices()
        *chunks, largest_chunk = (
            -(-size // QUERIES) * QUERIES for size in (*((chunk,) if chunk else CHUNKS), largest_chunk)
        )
        self._chunks = tuple(sorted({0, min(SMALL_CHUNK, *chunks), *chunks}))
        chunk = chunks[-1]
        self._largest_chunk = largest_chunk
        self._beside: dict[int, int] = {}
        """By rows, the tokens of prompts that a step takes, where they are measured."""
        tokens = max(slots + chunk, 1 + largest_chunk)
        chosen = slots + MOST_PIECES

        def zeros(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.zeros(sizes, dtype=dtype, device=device)

        outputs = shape.query_size + shape.cached_size
        wide = shape.inner * (2 if shape.activation == "silu" else 1)
        self._hidden, self._normal = zeros(tokens, shape.hidden), zeros(tokens, shape.hidden)
        self._qkv, self._mixed = zeros(tokens, outputs), zeros(tokens, shape.query_size)
        pairs = tokens * max(1, shape.chosen_experts)
        self._inner, self._active = zeros(0 if shape.experts else tokens, wide), zeros(pairs, shape.inner)
        if shape.experts:
            self._experts_of, self._shares = zeros(pairs, dtype=torch.int32), zeros(pairs, dtype=torch.float32)
            self._lines = zeros(shape.experts * tokens, dtype=torch.int32)
            self._counts = zeros(shape.experts, dtype=torch.int32)
            self._answers = zeros(pairs, shape.hidden, dtype=torch.float32)
        self._picked, self._logits = zeros(chosen, shape.hidden), zeros(chosen, shape.vocabulary)
        self._chosen = zeros(chosen, dtype=torch.int64)
        self._head_block = 16
        blocks = -(-shape.vocabulary // self._head_block)
        self._values = zeros(min(slots, MOST_FUSED_ROWS), blocks, dtype=torch.float32)
        self._names = zeros(min(slots, MOST_FUSED_ROWS), blocks, dtype=torch.int32)
        self._grouped = max(16, triton.next_power_of_2(shape.group))
        parts = max(rows * self._splits(rows) for rows in self._row_buckets) * shape.kv_heads * self._grouped
        self._partial = zeros(parts * shape.head_size, dtype=torch.float32)
        self._sums = zeros(parts * 2, dtype=torch.float32)
        self._arrivals = zeros(slots * shape.kv_heads, dtype=torch.int32)
        integers = max(StepSize(slots, chunk).integers, StepSize(1, largest_chunk).integers)
        self._integers = zeros(integers, dtype=torch.int32)
        pinned = device.type == "cuda"
        # A step begins after the tokens of the last but one have arrived, so its array is free.
        self._host = cycle([torch.zeros(integers, dtype=torch.int32, pin_memory=pinned) for _ in range(3)])
        self._turns = None
        if weights.frequencies is not None:
            self._turns = torch.view_as_real(weights.rotations(max_length)).contiguous()
        self._graphs: dict[StepSize, torch.cuda.CUDAGraph] = {}
        self._choices = self._trouble = ""
        self._fused: dict[int, bool] = {}
        """By rows, whether a step without prompts takes the fused kernels."""
        self._precision = "ieee" if dtype == torch.float32 else "tf32"

    def describe(self) -> dict[str, object]:
        fused = [rows for rows, chosen in self._fused.items() if chosen]
        return {
            "mode": "graph" if self._graphs else "eager",
            "attention": "Triton, split over the live tokens",
            "kernels": f"Triton {triton.__version__} and cuBLAS",
            "cuda_graphs": len(self._graphs),
            "graph_rows": list(self._row_buckets),
            "graph_prompt_tokens": [*self._chunks, self._largest_chunk],
            "fused_rows": fused,
            "prompt_tokens_beside_rows": list(self._beside.values()),
            **({"choices": self._choices} if self._choices else {}),
            **({"choice_trouble": self._trouble} if self._trouble else {}),
        }

    def prompt_tokens_beside(self, rows: int) -> int:
        return self._beside.get(self._bucket(rows), 0)

    def _bucket(self, rows: int) -> int:
        return next(bucket for bucket in self._row_buckets if bucket >= rows)

    @property
    def can_fuse(self) -> bool:
        """Whether the fused kernels know this decoder: RMSNorm, RoPE, a gated feed-forward part without bias, and sizes
        that their tiles divide."""
        shape, layer = self.weights.shape, self.weights.layers[0]
        plain = layer.up.bias is None and layer.down.bias is None
        whole = not any(width % LEAST_TILE for width in (shape.hidden, shape.query_size, shape.inner))
        return self._turns is not None and shape.activation == "silu" and not shape.centred and plain and whole

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Compile the kernels, choose the form of each size and capture the graphs, the largest first. What an earlier
        start chose is kept, so that two starts execute the same."""
        key = {"decoder": repr(self.weights.shape), "dtype": str(self.dtype), "rows": str(self._row_buckets)}
        key |= {"chunks": str((self._chunks, self._largest_chunk)), "length": str(self.max_length)}
        cache = ChoiceCache(machine_key(self.device, Path(__file__).parent) | key)
        chooses = self._graphs_wanted and makes_choices()
        with cache.held() if chooses else nullcontext():
            self._warm_up(cache if chooses else None)
        self._trouble = cache.trouble

    def _warm_up(self, cache: ChoiceCache | None) -> None:
        stored = {} if cache is None else cache.read()
        try:
            kept = {int(rows): bool(fused) for rows, fused in stored["fused"].items()}
            beside_rows = {int(rows): int(tokens) for rows, tokens in stored["beside"].items()}
        except (KeyError, TypeError, ValueError, AttributeError):
            kept, beside_rows = {}, {}
            if cache is not None and stored:
                cache.reject()
        sizes = [StepSize(rows, chunk) for rows in self._row_buckets for chunk in self._chunks]
        sizes.append(StepSize(1, self._largest_chunk))
        pool = torch.cuda.graph_pool_handle() if self._graphs_wanted else None
        durations: dict[StepSize, float] = {}
        for size in sorted(set(sizes), key=lambda size: size.tokens, reverse=True):
            few = not size.chunk and size.rows <= MOST_FUSED_ROWS
            forms = [False, True] if self.can_fuse and few and makes_choices() else [False]
            if not size.chunk and kept.get(size.rows) in forms:
                forms = [kept[size.rows]]
            self._integers.zero_()  # sizes divide the array differently: a position of one is a slot of another
            positions = _StepIntegers.of(self._integers, size).positions
            positions[: size.rows].fill_(min(512, self.max_length - 1))
            positions[size.rows :].fill_(min(1024, self.max_length - 1))
            timed = [(*self._capture(size, fused, pool), fused) for fused in forms]
            durations[size], graph, fused = min(timed, key=lambda form: form[0])
            if graph is not None:
                self._graphs[size] = graph
            if not size.chunk:
                self._fused[size.rows] = fused
        for rows in self._row_buckets:
            if self._measures_chunks and beside_rows.get(rows) in self._chunks:
                self._beside[rows] = beside_rows[rows]
            elif self._measures_chunks:
                alone, *beside = (durations[StepSize(rows, chunk)] for chunk in self._chunks)
                most = max(alone * LONGEST_STEP, beside[0] * LONGEST_PIECE)
                self._beside[rows] = max(
                    chunk for chunk, duration in zip(self._chunks[1:], beside, strict=True) if duration <= most
                )
        chosen = {
            "fused": {str(rows): fused for rows, fused in self._fused.items()},
            "beside": {str(rows): tokens for rows, tokens in self._beside.items()},
        }
        if cache is not None:
            self._choices = digest(chosen)
            if chosen != stored:
                cache.write(chosen)
        self.tokens.zero_()

    def _capture(self, size: StepSize, fused: bool, pool: Any) -> tuple[float, torch.cuda.CUDAGraph | None]:
        """Execute a form once, and capture it: the milliseconds of a replay, and the graph."""
        self._launch(size, fused)
        if not self._graphs_wanted:
            return 0.0, None
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        # Only this thread's calls count, see `servers.engines.torch.copies.capture`.
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            self._launch(size, fused)
        return self._shortest_replay(graph, self._shortest_replay(graph, math.inf)), graph

    def _shortest_replay(self, graph: torch.cuda.CUDAGraph, expected: float) -> float:
        """The milliseconds of the shortest of some replays; the fewer, the longer they are expected to be. Not a mean,
        which would be wrong where another process has the GPU for a while."""
        count = max(2, min(TIMED_REPLAYS, int(TIMED_MS / expected)))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        for event in events:
            event.record()
            graph.replay()
        torch.cuda.synchronize(self.device)
        shortest: float = min(begin.elapsed_time(end) for begin, end in pairwise(events))
        return shortest

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> Tensor:
        size = self._size(plan)
        host = next(self._host)[: size.integers]
        self._fill(_StepIntegers.of(host.numpy(), size), plan, size)
        self._integers[: size.integers].copy_(host, non_blocking=True)
        graph = self._graphs.get(size)
        if graph is not None:
            graph.replay()
        else:
            self._launch(size, not size.chunk and self._fused.get(size.rows, self.can_fuse and size.rows <= 16))
        return self._chosen

    def _size(self, plan: StepPlan) -> StepSize:
        rows = self._bucket(len(plan.lengths))
        chunk = sum(-(-len(piece.ids) // QUERIES) * QUERIES for piece in plan.pieces)
        chunks = (*self._chunks, self._largest_chunk) if not plan.lengths else self._chunks
        return StepSize(rows, next(bucket for bucket in chunks if bucket >= chunk))

    def _fill(self, host: _StepIntegers, plan: StepPlan, size: StepSize) -> None:
        """Write what differs between steps."""
        rows = len(plan.lengths)
        host.positions[:] = -1
        host.positions[:rows] = plan.lengths
        host.slots[: size.rows] = range(size.rows)
        host.targets[:] = -1
        host.targets[:rows] = host.picks[:rows] = range(rows)
        host.picks[rows:] = 0
        begin, chosen = 0, rows
        for piece in plan.pieces:
            count = len(piece.ids)
            host.ids[begin : begin + count] = piece.ids
            flat = size.rows + begin
            host.positions[flat : flat + count] = range(piece.start, piece.start + count)
            host.slots[flat : flat + count] = piece.slot
            if piece.last:
                host.picks[chosen], host.targets[chosen] = flat + count - 1, piece.slot
                chosen += 1
            begin += -(-count // QUERIES) * QUERIES

    def _launch(self, size: StepSize, fused: bool) -> None:
        """Enqueue the kernels of a step of this size."""
        shape, weights = self.weights.shape, self.weights
        arrays = _StepIntegers.of(self._integers, size)
        hidden = self._hidden[: size.tokens]
        kernels.embed_kernel[(size.tokens,)](
            self.tokens, arrays.ids, arrays.positions, weights.embedding,
            weights.embedding if weights.positions is None else weights.positions, hidden, size.rows,
            HIDDEN=shape.hidden, PADDED=triton.next_power_of_2(shape.hidden), PLACED=weights.positions is not None,
        )  # fmt: skip
        for index, layer in enumerate(weights.layers):
            (self._fused_layer if fused else self._plain_layer)(index, layer, size, arrays)
        self._choose(size, arrays, fused)

    def _fused_layer(self, index: int, layer: LayerWeights, size: StepSize, arrays: _StepIntegers) -> None:
        shape, rows = self.weights.shape, size.rows
        hidden, active, mixed = self._hidden, self._active, self._mixed
        outputs = shape.query_size + shape.cached_size
        tile = _tile(rows, shape.hidden)
        kernels.qkv_kernel[(outputs // tile["BN"],)](
            hidden, layer.norm_1.weight, layer.qkv.weight, _or(layer.qkv.bias, layer.qkv), self._turns,
            arrays.positions, self._qkv, self.cache[index], rows, self.max_length, EPSILON=shape.epsilon,
            BIAS=layer.qkv.bias is not None, HIDDEN=shape.hidden, HEADS=shape.heads, KV_HEADS=shape.kv_heads,
            WIDTH=shape.head_size, PRECISION=self._precision, **tile,
        )  # fmt: skip
        self._row_attention(index, layer, size, arrays)
        self._add_fused(hidden, mixed, layer.out, rows)
        kernels.gated_product_kernel[(-(-shape.inner // tile["BN"]),)](
            hidden, layer.norm_2.weight, layer.up.weight, active, rows, EPSILON=shape.epsilon, N=shape.inner,
            K=shape.hidden, PRECISION=self._precision, **tile,
        )  # fmt: skip
        self._add_fused(hidden, active, layer.down, rows)

    def _add_fused(self, hidden: Tensor, inputs: Tensor, part: Affine, rows: int) -> None:
        """hidden += inputs Wᵀ + bias."""
        count, width = part.weight.shape
        tile = _tile(rows, width)
        kernels.add_product_kernel[(-(-count // tile["BN"]),)](
            inputs, part.weight, _or(part.bias, part), hidden, rows, BIAS=part.bias is not None, N=count, K=width,
            PRECISION=self._precision, **tile,
        )  # fmt: skip

    def _plain_layer(self, index: int, layer: LayerWeights, size: StepSize, arrays: _StepIntegers) -> None:
        shape, tokens = self.weights.shape, size.tokens
        hidden, qkv = self._hidden[:tokens], self._qkv[:tokens]
        _product(self._norm(hidden, layer.norm_1), layer.qkv, qkv)
        heads = 8
        kernels.rope_kernel[(tokens, -(-(shape.heads + 2 * shape.kv_heads) // heads))](
            qkv, qkv if self._turns is None else self._turns, arrays.positions, arrays.slots, self.cache[index],
            self.max_length, HEADS=shape.heads, KV_HEADS=shape.kv_heads, WIDTH=shape.head_size,
            TURNED=self._turns is not None, BLOCK=heads, HALF=triton.next_power_of_2(shape.head_size // 2), num_warps=4,
        )  # fmt: skip
        self._row_attention(index, layer, size, arrays)
        if size.chunk:
            self._prompt_attention(index, layer, size, arrays)
        _add_product(hidden, self._mixed[:tokens], layer.out)
        if shape.experts:
            self._experts(hidden, self._norm(hidden, layer.norm_2), layer, arrays.positions)
            return
        inner = self._inner[:tokens]
        _product(self._norm(hidden, layer.norm_2), layer.up, inner)
        if shape.activation == "silu":
            active, block = self._active[:tokens], 1024
            kernels.silu_product_kernel[(tokens, -(-shape.inner // block))](
                inner, active, INNER=shape.inner, BLOCK=block
            )
        else:
            active = functional.gelu(inner, approximate=shape.activation)
        _add_product(hidden, active, layer.down)

    def _experts(self, hidden: Tensor, normal: Tensor, layer: LayerWeights, positions: Tensor) -> None:
        """Add the answers of each token's experts, of which only the chosen ones are read."""
        shape, router, most = self.weights.shape, layer.router, len(hidden)
        assert router is not None
        assert router.bias is not None
        pairs, chosen = most * shape.chosen_experts, shape.chosen_experts
        logits = torch.addmm(router.bias, normal, router.weight.t())
        kernels.route_kernel[(most,)](
            logits, positions, self._experts_of, self._shares, EXPERTS=shape.experts,
            PADDED=triton.next_power_of_2(shape.experts), CHOSEN=chosen, PLACES=triton.next_power_of_2(chosen),
            num_warps=1,
        )  # fmt: skip
        kernels.gather_kernel[(shape.experts,)](self._experts_of, self._lines, self._counts, pairs, most, BLOCK=256)
        block = min(64, max(16, triton.next_power_of_2(pairs // shape.experts)))
        wide = {"BM": block, "BN": 64 if block < 64 else 128, "BK": 64, "PRECISION": self._precision}
        wide |= {"STAGES": 2 if self.dtype == torch.float32 else 4, "num_warps": 4}
        narrow = wide | {"BN": 32 if block == 16 else wide["BN"]}
        blocks, width = -(-most // block), 2 * shape.inner
        kernels.expert_up_kernel[(-(-width // wide["BN"]), blocks, shape.experts)](
            normal, layer.up.weight, layer.up.bias, self._lines, self._counts, self._active, most, shape.swiglu_limit,
            shape.swiglu_alpha, CHOSEN=chosen, N=width, K=shape.hidden, **wide,
        )  # fmt: skip
        kernels.expert_down_kernel[(-(-shape.hidden // narrow["BN"]), blocks, shape.experts)](
            self._active, layer.down.weight, layer.down.bias, self._shares, self._lines, self._counts, self._answers,
            most, N=shape.hidden, K=shape.inner, **narrow,
        )  # fmt: skip
        kernels.add_experts_kernel[(most, -(-shape.hidden // 1024))](
            self._answers, positions, hidden, CHOSEN=chosen, HIDDEN=shape.hidden, BLOCK=1024
        )

    def _norm(self, hidden: Tensor, norm: Affine) -> Tensor:
        shape = self.weights.shape
        if shape.centred:
            return functional.layer_norm(hidden, (shape.hidden,), norm.weight, norm.bias, shape.epsilon)
        normal = self._normal[: len(hidden)]
        self._rms_norm(hidden, hidden, norm, normal, picked=False)
        return normal

    def _rms_norm(self, hidden: Tensor, picks: Tensor, norm: Affine, out: Tensor, *, picked: bool) -> None:
        shape = self.weights.shape
        kernels.norm_kernel[(len(out),)](
            hidden, picks, norm.weight, out, EPSILON=shape.epsilon, HIDDEN=shape.hidden,
            PADDED=triton.next_power_of_2(shape.hidden), PICKED=picked, num_warps=8,
        )  # fmt: skip

    def _splits(self, rows: int) -> int:
        """Parts into which a row's live tokens are divided at most."""
        wanted = -(-PROGRAMS // (rows * self.weights.shape.kv_heads))
        splits: int = min(MOST_SPLITS, triton.next_power_of_2(wanted))
        return splits

    def _row_attention(self, index: int, layer: LayerWeights, size: StepSize, arrays: _StepIntegers) -> None:
        shape, splits = self.weights.shape, self._splits(size.rows)
        kernels.row_attention_kernel[(size.rows, shape.kv_heads, splits)](
            self._qkv, self.cache[index], _or(layer.sinks, layer.qkv), arrays.positions, self._mixed, self._partial,
            self._sums, self._arrivals, self._qkv.shape[1], self.max_length, shape.scale * 1.4426950408889634,
            GROUP=shape.group, GROUPED=self._grouped, WIDTH=shape.head_size, BLOCK=32 if splits > 4 else 64,
            SPLITS=splits, WINDOW=layer.window, SINKS=layer.sinks is not None, PRECISION=self._precision, num_warps=4,
        )  # fmt: skip

    def _prompt_attention(self, index: int, layer: LayerWeights, size: StepSize, arrays: _StepIntegers) -> None:
        shape = self.weights.shape
        kernels.prompt_attention_kernel[(size.chunk // QUERIES, shape.kv_heads)](
            self._qkv, self.cache[index], _or(layer.sinks, layer.qkv), arrays.positions, arrays.slots, self._mixed,
            size.rows, self._qkv.shape[1], self.max_length, shape.scale * 1.4426950408889634, GROUP=shape.group,
            GROUPED=triton.next_power_of_2(shape.group), WIDTH=shape.head_size, QUERIES=QUERIES, BLOCK=64,
            WINDOW=layer.window, SINKS=layer.sinks is not None, PRECISION=self._precision,
            num_warps=8 if shape.head_size > 64 else 4,
        )  # fmt: skip

    def _choose(self, size: StepSize, arrays: _StepIntegers, fused: bool) -> None:
        """The last norm and product, the greedy tokens, and where they go."""
        weights, shape, rows = self.weights, self.weights.shape, size.chosen
        if fused:
            tile = _tile(rows, shape.hidden) | {"BN": self._head_block}
            blocks = -(-shape.vocabulary // self._head_block)
            kernels.head_kernel[(blocks,)](
                self._hidden, weights.norm.weight, weights.head, self._values, self._names, rows,
                EPSILON=shape.epsilon, N=shape.vocabulary, K=shape.hidden, PRECISION=self._precision, **tile,
            )  # fmt: skip
            values, names, entries = self._values, self._names, blocks
        else:
            picked = self._picked[:rows]
            if shape.centred:
                chosen = self._hidden[: size.tokens].index_select(0, arrays.picks)
                picked = functional.layer_norm(
                    chosen, (shape.hidden,), weights.norm.weight, weights.norm.bias, shape.epsilon
                )
            else:
                self._rms_norm(self._hidden, arrays.picks, weights.norm, picked, picked=True)
            values = self._logits[:rows]
            torch.mm(picked, weights.head.t(), out=values)
            names, entries = self._names, shape.vocabulary
        kernels.choose_kernel[(rows,)](
            values, names, arrays.targets, self.tokens, self._chosen, entries, NAMED=fused, BLOCK=4096, num_warps=8
        )


def _tile(rows: int, width: int) -> dict[str, Any]:
    """The sizes of a fused product's tiles, for so many rows and inputs."""
    block = next(size for size in (512, 256, 128, 64, LEAST_TILE) if width % size == 0)
    if rows == 1:
        return {"BM": 1, "BN": 8, "BK": block, "STAGES": 3, "num_warps": 4}
    lines = 16 if rows <= 16 else 32 if rows <= 32 else 64
    return {"BM": lines, "BN": 16, "BK": min(block, 256 if lines == 16 else 128), "STAGES": 4, "num_warps": 4}


def _or(tensor: Tensor | None, part: Affine) -> Tensor:
    """What a kernel gets for a tensor that it will not read."""
    return part.weight if tensor is None else tensor


def _product(inputs: Tensor, part: Affine, out: Tensor) -> None:
    """out = inputs Wᵀ + bias."""
    if part.bias is None:
        torch.mm(inputs, part.weight.t(), out=out)
    else:
        torch.addmm(part.bias, inputs, part.weight.t(), out=out)


def _add_product(hidden: Tensor, inputs: Tensor, part: Affine) -> None:
    """hidden += inputs Wᵀ + bias."""
    hidden.addmm_(inputs, part.weight.t())
    if part.bias is not None:
        hidden += part.bias
