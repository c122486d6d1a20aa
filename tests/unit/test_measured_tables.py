"""Every table of docs/results/measured is computed from stored files, or printed by a seeded command that it names."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import permutations
from statistics import median
from types import EllipsisType
from typing import Any

import pytest

from loadgen.base.documents import read_record
from loadgen.engines.analyse import Cells, cells_of, estimate, ratios
from loadgen.records.matrix import MatrixPlan, Visit
from tests.truth import tables as simulated
from tests.unit.test_published_figures import INTERVAL, PUBLISHED, ROOT, Interval, reads, sections, stored_intervals

MEASURED = PUBLISHED / "measured"
FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)?")
Cell = float | None | Sequence[float] | EllipsisType
Row = tuple[str, list[Cell]]
"""The first cells of a row, joined, and the figures of the others; None: a cell without one, …: what is quoted."""
BERT, DISTILBERT = ":bert-base-uncased", "distilbert-base-uncased"
LOADS = ("1x1", "64x1", "4x32")
TRANSPORTS = {
    "HTTP": "http", "gRPC": "grpc", "HTTP, system shared memory": "http shm", "HTTP, CUDA shared memory": "http cuda",
    "system shared memory": "http shm",
}  # fmt: skip


def document(name: str) -> Any:
    return json.loads((PUBLISHED / name).read_text())


def runs(name: str) -> dict[tuple[str, str, str], dict[str, list[Any]]]:
    """The rounds of each server, by payload, transport and load."""
    return {(run["payload"], run["transport"], run["load"]): run for run in document(name)["runs"]}


@cache
def cells(folder: str) -> list[dict[str, str]]:
    """Those of an engine matrix."""
    return list(
        csv.DictReader(io.StringIO(gzip.decompress((PUBLISHED / folder / "cells.csv.gz").read_bytes()).decode()))
    )


def cell(folder: str, **asked: object) -> dict[str, float]:
    """The figures of one cell; a model is named by its end."""
    (chosen,) = (
        row
        for row in cells(folder)
        if all(
            row[key].endswith(str(value)) if key == "model" else row[key] == str(value) for key, value in asked.items()
        )
    )
    return {name: float(value) for name, value in chosen.items() if re.fullmatch(r"-?\d+(\.\d+)?(e[+-]\d+)?", value)}


@cache
def rounds_of(folder: str) -> tuple[MatrixPlan, Cells]:
    """The plan of an engine matrix, and each cell's latency in every round, from the packed records."""
    with tarfile.open(PUBLISHED / folder / "records.tar.xz") as tar:
        files = {entry.name: tar.extractfile(entry).read() for entry in tar if entry.isfile()}  # type: ignore[union-attr]
    plan = read_record(files["plan.json"], MatrixPlan)
    return plan, cells_of(plan, [read_record(files[n], Visit) for n in sorted(files) if n.startswith("visits/")])


def ratio(folder: str, model: str, over: str, under: str, batch: int) -> list[float]:
    """The throughput of one engine/mode/precision over another's, paired by round, with its interval as of that day."""
    plan, found = rounds_of(folder)
    titles = [f"{c.model}/{c.engine}/{c.mode}/{c.precision}" for c in plan.configurations]
    one, other = (next(i for i, t in enumerate(titles) if t.endswith(f"{model}/{path}")) for path in (over, under))
    estimated = estimate(ratios(found[one, (batch, None)], found[other, (batch, None)]), kept=False)
    assert estimated is not None
    return [estimated.value, estimated.low or 0.0, estimated.high or 0.0]


@cache
def paired(folder: str) -> frozenset[Interval]:
    """The intervals of all ratios of two configurations at one shape of a model."""
    plan, found = rounds_of(folder)
    intervals = []
    for one, other in permutations(found.values(), 2):
        scopes = {plan.configurations[each.configuration].scope for each in (one, other)}
        if one.shape == other.shape and len(scopes) == 1:
            estimated = estimate(ratios(one, other), kept=False)
            intervals.append((estimated.low, estimated.high) if estimated is not None else (None, None))
    return frozenset((low, high) for low, high in intervals if low is not None and high is not None)


def served() -> Iterator[Row]:
    rates, engine = runs("2026-11-28-h200/rates.json"), engine_rows("2026-11-23-h200-served/engine-uint8.json")
    for title in list(TRANSPORTS)[:4]:
        row: list[Cell] = []
        for payload in ("uint8", "fp32"):
            of = [rates[payload, TRANSPORTS[title], load]["native"] for load in LOADS]
            row.append(median(one["p50_ms"] for one in of[0]))
            row += [median(one["images_per_s"] for one in rounds) for rounds in of[1:]]
            if payload == "uint8":
                row.append(float(str(row[-1])) / engine[32]["items_per_second"])
        yield title, row


def over_rounds(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """The median of the rounds' ratios, the least and the greatest."""
    ratios = [one / other for one, other in zip(ours, theirs, strict=True)]
    return [median(ratios), min(ratios), max(ratios)]


def served_over_triton() -> Iterator[Row]:
    rates = runs("2026-11-28-h200/rates.json")
    for title in list(TRANSPORTS)[:4]:
        of = [rates[payload, TRANSPORTS[title], load] for payload in ("uint8", "fp32") for load in LOADS]
        yield (
            title,
            [over_rounds(*([one["images_per_s"] for one in run[s]] for s in ("native", "triton"))) for run in of],
        )


def served_over_plain() -> Iterator[Row]:
    rates = runs("2026-11-23-h200-served/plain.json")
    for title, load in zip(("1 client", "64 clients", "4 clients × 32"), LOADS, strict=True):
        run = rates["uint8", "http", load]
        speeds = {s: [one[0] for one in run[s]] for s in ("native", "fastapi", "litserve")}
        row: list[Cell] = [[median(speeds[s]), median(one[1] for one in run[s])] for s in speeds]
        yield title, row + [over_rounds(speeds["native"], speeds[other]) for other in ("fastapi", "litserve")]


def one_client() -> Iterator[Row]:
    rates = runs("2026-11-28-h100/poll-rates.json")
    for title in ("HTTP", "gRPC", "system shared memory"):
        for poll_us, name in ((0, "sleeping"), (1000, "polling")):
            rounds = rates["uint8", TRANSPORTS[title], "1x1"][name]
            stages = [median(one["stages_us"][s] for one in rounds) for s in rounds[0]["stages_us"]]
            p50 = 1000.0 * median(one["p50_ms"] for one in rounds)
            busy = median(sum(one["busy_cores"]) for one in rounds)
            yield f"{title} | {poll_us}", [*stages, p50 - sum(stages), p50, p50 / stages[3], busy]


def plain_sockets() -> Iterator[Row]:
    """The first and the last table of a text."""
    found = [
        (row[0], [row[1], row[5:]])
        for line in (PUBLISHED / "2026-11-28-h100/fp32-rates.txt").read_text().splitlines()
        if re.match(r"\| \d", line) and (row := FIGURE.findall(line))
    ]
    for (connections, first), (_, last) in zip(found[:3], found[-3:], strict=True):
        yield connections, [as_cell(part) for part in (*first, *last)]


def tls() -> Iterator[Row]:
    for row in document("2026-11-29-tls-cpu/tls.json"):
        label = (
            f"{'HTTP' if row['protocol'] == 'http' else 'gRPC'}, {'kept' if row['kept'] else 'new'} | {row['bytes']}"
        )
        yield label, [row["plain_us"], row["tls_us"], [row["ratio"], row["low"], row["high"]]]


def as_cell(text: str | list[str]) -> Cell:
    return float(text.replace(",", "")) if isinstance(text, str) else [float(part) for part in text]


def jpeg() -> Iterator[Row]:
    for image in document("2026-11-23-h200-served/jpeg.json"):
        batches = image["nvjpeg_and_torchvision_on_the_gpu_ms_per_batch"]
        if image["width"] in (256, 640, 1920, 4000):
            times = image["simplejpeg_and_pillow_on_one_core_ms"], batches["1"], batches["8"] / 8
            differences = image["mean_difference_of_a_pixel"], image["largest_difference"]
            yield f"{image['width']} × {image['height']}", [*times, *differences]


def engine_rows(name: str) -> dict[int, dict[str, float]]:
    return {batch["batch"]: batch for batch in document(name)["batches"]}


ENGINES = "2026-11-20-h200/engines"
BOTH = {"torch, graph": "torch-fp16-uint8", "ONNX Runtime, graph": "onnxruntime-fp16-uint8"}


def plans() -> Iterator[Row]:
    found = document(f"{ENGINES}/plans.json")
    times = {batch: plan["us"] for batch, plan in found["variants"]["hopper_plan"].items()}
    times["2"] = found["found"]["2"]["us"]
    yield "the plans in use", [times[str(2**power)] for power in range(8)]


def whole_engines() -> Iterator[Row]:
    for title, name in BOTH.items():
        for batch, of in engine_rows(f"{ENGINES}/{name}.json").items():
            if batch not in (2, 4):
                times = of["execution_ns"] / 1e6, of["call_ns"] / 1e6
                share = 100.0 * of["share_of_matrix_product"]
                yield f"{title} | {batch}", [*times, of["images_per_second"], of["tflops"], share, of["cosine_to_fp32"]]


def categories() -> Iterator[Row]:
    profiles = [{p["batch"]: p for p in document(f"{ENGINES}/{name}.json")["profile"]} for name in BOTH.values()]
    chosen = [profile[batch] for batch in (1, 32, 128) for profile in profiles]
    for place, category in enumerate(chosen[0]["categories"]):
        yield category["name"], [profile["categories"][place]["us"] for profile in chosen]
    yield "launches", [profile["launches"] for profile in chosen]


def other_modes() -> Iterator[Row]:
    for title, name in (
        *((f"torch fp16, `{mode}`", f"torch-fp16-uint8-{mode}") for mode in ("eager", "scripted", "traced", "compile")),
        ("torch fp32, `graph`", "torch-fp32-uint8"),
        ("ONNX Runtime fp32, `graph`", "onnxruntime-fp32-uint8"),
        ("ONNX Runtime tf32, `graph`", "onnxruntime-tf32-uint8"),
        ("ONNX Runtime fp16, `graph`, torch's own export", "onnxruntime-fp16-uint8-standard"),
    ):
        of = engine_rows(f"{ENGINES}/{name}.json")
        yield title, [of[batch]["execution_ns"] / 1e6 if batch in of else None for batch in (1, 8, 32, 64)]


CPU, IMAGES, TEXT = "2026-11-24-engines-cpu/matrix", "2026-11-24-engines-h200/images", "2026-11-24-engines-h200/text"


def two_cores() -> Iterator[Row]:
    for title, model, length in (
        ("ResNet-50", "resnet50", ""), ("ViT-B/16", "vit_b_16", ""), ("BERT-base, length 128", BERT, 128),
        ("DistilBERT, length 128", DISTILBERT, 128),
    ):  # fmt: skip
        for threads in (1, 2):
            row: list[Cell] = []
            for engine, mode in (
                ("torch", "eager"),
                ("torch", "traced"),
                ("onnxruntime", "session"),
                ("openvino", "latency"),
                ("jax", "jit"),
            ):
                of = cell(CPU, model=model, engine=engine, mode=mode, threads=threads, batch=8, length=length)
                row.append([of[name] for name in ("items_per_second", "speedup_low", "speedup_high") if name in of])
            yield f"{title}, {threads} thread{'s' * (threads > 1)}", row


def h200(model: str, folder: str) -> Callable[[], Iterator[Row]]:
    def rows() -> Iterator[Row]:
        for path in ("torch/eager", "torch/traced", "torch/graph", "torch/compile", "onnxruntime/graph", "jax/jit"):
            engine, mode = path.split("/")
            row: list[Cell] = []
            for precision in ("fp32", "tf32", "fp16", "bf16"):
                try:
                    of = [
                        cell(folder, model=model, engine=engine, mode=mode, precision=precision, batch=batch)
                        for batch in (128, 1)
                    ]
                except ValueError:
                    row.append(None)
                else:
                    row.append([one["items_per_second"] for one in of])
            yield path, row

    return rows


def study_c_on_cpus() -> Iterator[Row]:
    for length in (64, 128, 256, 384):
        asked = {"model": BERT, "engine": "onnxruntime", "batch": 1, "length": length}
        of = [cell(CPU, threads=threads, **asked) for threads in (1, 2)]
        yield str(length), [..., *([one[f"latency_ms{end}"] for end in ("", "_low", "_high")] for one in of)]


def study_b() -> Iterator[Row]:
    for title, model, precision, mode in (
        ("ResNet-50, FP32 eager", "resnet50", "fp32", "eager"), ("ResNet-50, FP16 eager", "resnet50", "fp16", "eager"),
        ("ResNet-50, FP32 TorchScript", "resnet50", "fp32", "traced"),
        ("ViT-B/16, FP32 eager", "vit_b_16", "fp32", "eager"), ("ViT-B/16, FP16 eager", "vit_b_16", "fp16", "eager"),
    ):  # fmt: skip
        of = cell(IMAGES, model=model, engine="torch", mode=mode, precision=precision, batch=32)
        both = [of["latency_ms"], of["items_per_second"]]
        yield title, [..., both, [of["latency_ms_low"], of["latency_ms_high"]]]
    for title, model in (("FP16 over FP32, ResNet-50", "resnet50"), ("FP16 over FP32, ViT-B/16", "vit_b_16")):
        value, low, high = ratio(IMAGES, model, "torch/eager/fp16", "torch/eager/fp32", 32)
        yield title, [..., value, [low, high]]


def study_c() -> Iterator[Row]:
    for batch, title, model in (
        *((batch, str(batch), BERT) for batch in (1, 8, 16, 32)), (1, "1, DistilBERT", DISTILBERT),
    ):  # fmt: skip
        of = [
            cell(TEXT, model=model, engine="onnxruntime", mode="graph", precision=precision, batch=batch)
            for precision in ("fp32", "tf32")
        ]
        yield title, [..., *([one[f"call_ms{end}"] for end in ("", "_low", "_high")] for one in of)]


def study_e() -> Iterator[Row]:
    for title, model in (("ResNet-50", "resnet50"), ("ViT-B/16", "vit_b_16")):
        yield f"{title}, H100 NVL, as quoted", [..., ..., ..., None]
        for precision in ("fp32", "tf32"):
            of = [
                cell(IMAGES, model=model, engine=engine, mode=mode, precision=precision, batch=128)["items_per_second"]
                for engine, mode in (("torch", "eager"), ("jax", "jit"))
            ]
            paths = [f"{path}/{precision}" for path in ("torch/eager", "torch/compile", "jax/jit")]
            yield f"{title}, H200, {precision.upper()}", [
                *of, *(ratio(IMAGES, model, paths[2], path, 128) for path in paths[:2]),
            ]  # fmt: skip


def break_even(folder: str, *models: str) -> Callable[[], Iterator[Row]]:
    def rows() -> Iterator[Row]:
        matrix = json.loads(gzip.decompress((PUBLISHED / folder / "matrix.json.gz").read_bytes()))
        of: dict[tuple[str, str, int], dict[str, Any]] = {}
        for entry in matrix["break_even"]:
            path = matrix["plan"]["configurations"][entry["configuration"]]
            if path["precision"] == "fp16":
                of[path["model"], f"{path['engine']}/{path['mode']}", entry["batch"]] = entry
        for title, path in (
            ("CUDA graphs", "torch/graph"), ("TorchScript", "torch/traced"), ("torch.compile", "torch/compile"),
            ("ONNX Runtime", "onnxruntime/graph"), ("JAX", "jax/jit"),
        ):  # fmt: skip
            entries = [[of[model, path, batch] for batch in (1, 128)] for model in models]
            items = [entry["items"] or {} for pair in entries for entry in pair]
            yield (
                title,
                [
                    [pair[0]["one_time_seconds"] for pair in entries],
                    *([one[end] for end in ("value", "low", "high") if one.get(end) is not None] for one in items),
                ],
            )

    return rows


TABLES: dict[str, list[Callable[[], Iterator[Row]] | None]] = {
    "native-server": [served, served_over_triton, served_over_plain, one_client, plain_sockets, jpeg, None, None, tls],
    "engines": [plans, whole_engines, categories, other_modes],
    "engine-matrix": [
        two_cores, study_c_on_cpus, h200("resnet50", IMAGES), h200("vit_b_16", IMAGES), h200(BERT, TEXT),
        h200(DISTILBERT, TEXT), study_b, study_c, study_e,
        break_even(IMAGES, "torchvision:resnet50", "torchvision:vit_b_16"),
        break_even(TEXT, "transformers:bert-base-uncased", "transformers:distilbert-base-uncased"),
    ],
}  # fmt: skip


def tables_of(page: str) -> list[list[list[str]]]:
    """The cells of each table's rows; an empty first cell repeats the one above."""
    found = []
    for table in re.findall(r"(?m)^\|.*\n\|[-:| ]+\|\n((?:\|.*\n)+)", (MEASURED / f"{page}.md").read_text()):
        rows: list[list[str]] = []
        for line in table.splitlines():
            row = [each.strip().replace("*", "") for each in line.strip("|").split(" | ")]
            rows.append([row[0] or rows[-1][0], *row[1:]])
        found.append(rows)
    return found


@pytest.mark.parametrize(
    ("page", "place"), [(page, place) for page, all_ in TABLES.items() for place, rows in enumerate(all_) if rows]
)
def test_a_table_holds_what_the_files_hold(page: str, place: int) -> None:
    rows = TABLES[page][place]
    assert rows is not None
    shown = tables_of(page)[place]
    expected = list(rows())
    wrong = []
    assert len(shown) == len(expected)
    for (label, values), row in zip(expected, shown, strict=True):
        first = label.count(" | ") + 1
        assert " | ".join(row[:first]) == label
        for value, text in zip(values, row[first:], strict=True):
            if value is ...:  # quoted from a study of others
                continue
            figures = FIGURE.findall(text)
            numbers = [] if value is None else [value] if isinstance(value, int | float) else list(value)
            if len(figures) != len(numbers) or not all(map(reads, figures, numbers)):
                wrong.append((label, text, value))
    assert wrong == []


PAGES = sorted(path.stem for path in MEASURED.glob("*.md"))
SOURCE = re.compile(r"tests\.truth\.tables (\w+)|(tests/[\w/]+\.py)|\]\((\.\./\d{4}-[^)]+)\)")


@pytest.mark.parametrize("page", PAGES)
def test_every_interval_is_that_of_a_published_run_or_of_its_rounds(page: str) -> None:
    unknown = []
    of_tables = [value for rows in TABLES.get(page, ()) for _, values in (rows() if rows else ()) for value in values]
    ratios_of_tables = {tuple(value[-2:]) for value in of_tables if isinstance(value, list) and len(value) > 1}
    for section, folders in sections(MEASURED / f"{page}.md"):
        stored = {interval for folder in folders for interval in stored_intervals(folder)} | ratios_of_tables
        if page == "engine-matrix":
            matrices = (matrix.parent for folder in folders for matrix in folder.rglob("matrix.json.gz"))
            stored |= {interval for matrix in matrices for interval in paired(str(matrix.relative_to(PUBLISHED)))}
            reports = [report.read_text() for folder in folders for report in folder.rglob("summary.md")]
            stored |= {(float(low), float(high)) for low, high in INTERVAL.findall("".join(reports).replace(",", ""))}
        for match in INTERVAL.finditer(section):
            if not any(reads(match[1], low) and reads(match[2], high) for low, high in stored):
                unknown.append(match[0])
    assert unknown == []


@pytest.mark.parametrize("page", PAGES)
def test_every_table_has_a_source(page: str) -> None:
    """It is computed here, or its section links to the run whose intervals it has, or names what prints it."""
    for section in re.split(r"(?m)^(?=#{1,3} )", (MEASURED / f"{page}.md").read_text()):
        tables = re.findall(r"(?m)^\|[-:| ]+\|\n((?:\|.*\n)+)", section)
        with_figures = [table for table in tables if re.search(r"\d\.\d|\d,\d{3}", table)]
        sources = SOURCE.findall(section)
        assert all(hasattr(simulated, name) or not name for name, _, _ in sources)
        assert all((ROOT / file).is_file() or not file for _, file, _ in sources)
        assert all((MEASURED / link).exists() or not link for _, _, link in sources)
        assert not with_figures or sources, section.splitlines()[0]
    assert page not in TABLES or len(TABLES[page]) == len(tables_of(page))


SHORT = ("noise_floor", "restarts", "own_figures", "tails", "fixed_plan", "batches", "until_decided", "durations")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", SHORT)
def test_a_simulated_table_has_the_rows_that_its_command_prints(name: str) -> None:
    """Those that take two minutes at most."""
    (after,) = (
        text.partition(f"tables {name}`")[2]
        for text in ((MEASURED / f"{page}.md").read_text() for page in PAGES)
        if f"tables {name}`" in text
    )
    table = re.search(r"(?m)^\|[-:| ]+\|\n((?:\|.*\n)+)", after)
    assert table is not None
    printed = [f"| {row} |" for row in getattr(simulated, name)()]
    assert [row for row in table[1].splitlines() if row not in printed] == []
