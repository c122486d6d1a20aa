"""A choice among forms of a model: measured until its lead is clear, made once per machine, stored and shown.

Two starts of a server with the same settings must execute the same, whatever other programs ran during either. So the
first start measures and stores what it chose, starts at the same time wait for it, and later ones only compare answers.

Imports torch only to measure: a command that reads a choice does not need it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.metadata import version
from math import inf, log
from pathlib import Path
from time import monotonic, process_time_ns, sleep, time
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from servers.engines.interface import CHOICES, PLANS_FOLDER
from servers.models.files import keep_file, user_cache
from servers.models.specification import ModelSpecification

if TYPE_CHECKING:
    import torch
    from torch import nn

CLEAR_LEAD = 6
"""Rounds that one side must win more than the other: by chance, one of 32 races of six rounds ends so."""
FEWEST_ROUNDS = 3
"""So many rounds decide if one side wins all, by more than the rounds differ: for forms that far apart."""
MOST_ROUNDS = 31
MOST_SECONDS = 20.0
"""The longest that a start chooses, however busy the machine is."""
UNDECIDED_SECONDS = 600
"""How long a choice holds that was not clear when the time was over."""
TURNS, REPLAYS = 9, 3
"""Each graph is measured in that many turns, the first of which does not count, and is replayed that often in each."""
WAIT_SECONDS = 180.0
"""The longest wait for another start that is choosing; then this one chooses for itself."""

MOST_WAITING = 0.05
"""The share of its CPU time for which the threads of an undisturbed round may have waited for a core: 0.001 is usual
where nothing else runs, 0.06 and more beside a program on one of 16 cores, 0.3 and more on one of two."""

CLOCK_TICK_SECONDS = 0.02
"""A file's time may be so much older than the moment at which it was written."""

Call = Callable[[], object]


class Race(NamedTuple):
    """How two forms compared, each with the median CPU time of a call per batch, in milliseconds."""

    won: bool
    own_ms: list[float]
    other_ms: list[float]
    rounds: int
    decided: bool = True
    """False: the time was over before enough rounds."""


def race(
    pairs: Sequence[tuple[Call, Call]],
    seconds: float,
    margin: float,
    most_loss: float,
    deadline: float = inf,
    *,
    undisturbed: bool = False,
) -> Race:
    """Whether the second function of each pair, one pair per batch, is clearly faster than the first.

    Their threads have to sleep while they wait: then other programs that use the cores change the CPU times of a round
    alike where both functions are of one library. Those of two libraries they change otherwise: beside a program that
    keeps one of two cores busy torch needs less CPU time than alone, and ONNX Runtime more. These races have to be
    `undisturbed`: rounds in which threads waited for a core are not counted.

    Each round calls all of them, the two of a pair in turn, and is won where the second ones need at most `margin` of
    the time (the geometric mean of the pairs) and none needs more than `most_loss`. The lead is clear after
    `CLEAR_LEAD` rounds, or after `FEWEST_ROUNDS` if it is large. Without one the first function stays, after
    `MOST_ROUNDS` or, once it tried `CLEAR_LEAD` rounds, `seconds` of CPU time or the `deadline` in `monotonic` seconds.
    Nothing is decided if fewer rounds were counted before that. The first call of each, which prepares what later ones
    use, does not count.
    """
    ends_ns = process_time_ns() + round(seconds * 1e9)
    rounds, leads, clear, tried, before = list[list[tuple[int, int]]](), list[float](), False, 0, monotonic()
    for call in (call for pair in pairs for call in pair if before < deadline):
        cpu_ns(call)
    while len(rounds) < MOST_ROUNDS:
        began = monotonic()
        enough = tried >= CLEAR_LEAD and process_time_ns() > ends_ns
        if enough or began + (began - before) > deadline:  # the next round takes as long as the last one
            break
        before, first, times, tried = began, tried % 2, list[tuple[int, int]](), tried + 1
        waited, used_ns = waited_ns(), process_time_ns()
        for pair in pairs:
            earlier, later = cpu_ns(pair[first]), cpu_ns(pair[1 - first])
            times.append((later, earlier) if first else (earlier, later))
        if undisturbed and waited_ns() - waited > MOST_WAITING * (process_time_ns() - used_ns):
            continue
        ratios = [log(max(other, 1) / max(own, 1)) for own, other in times]
        leads.append(min(log(margin) - statistics.fmean(ratios), log(most_loss) - max(ratios)))
        rounds.append(times)
        if clear := _is_clear(leads):
            break
    own_ms, other_ms = (
        [round(statistics.median(times[batch][side] for times in rounds) / 1e6, 4) for batch in range(len(pairs))]
        if rounds
        else []
        for side in range(2)
    )
    return Race(clear and leads[-1] >= 0, own_ms, other_ms, len(rounds), clear or len(rounds) >= CLEAR_LEAD)


def _is_clear(leads: Sequence[float]) -> bool:
    """Whether one side leads clearly after these rounds; a lead is positive in a round that the second side won."""
    least, most = min(leads), max(leads)
    if len(leads) >= FEWEST_ROUNDS and (least >= most - least or -most >= most - least):
        return True
    return abs(sum(1 if lead >= 0 else -1 for lead in leads)) >= CLEAR_LEAD


def graph_times_ms(
    calls: Iterable[tuple[str, Call]], device: torch.device, note_failure: Callable[[str, Exception], None]
) -> dict[str, float]:
    """The median device time of a replay of each call, by title, as CUDA graphs that are replayed in turn. A call that
    cannot be captured has none; `note_failure` hears why."""
    import torch

    from servers.engines.torch.copies import capture
    from servers.gpu.kernel_probe import event_pair

    graphs: dict[str, torch.cuda.CUDAGraph] = {}
    for title, call in calls:
        try:
            graphs[title] = capture(call, device)
        except Exception as exc:  # noqa: BLE001  Triton's errors share no base
            note_failure(title, exc)
        if title not in graphs:  # not in the handler, where the exception holds what failed
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {title: [] for title in graphs}
    for _ in range(TURNS):
        for title, graph in graphs.items():
            begin, end = event_pair()
            begin.record()
            for _ in range(REPLAYS):
                graph.replay()
            end.record()
            end.synchronize()
            times[title].append(begin.elapsed_time(end) / REPLAYS)
    return {title: statistics.median(turns[1:]) for title, turns in times.items()}


def cpu_ns(call: Call) -> int:
    """The CPU time of a call on all threads: other programs use the cores while a server starts."""
    started_ns = process_time_ns()
    call()
    return process_time_ns() - started_ns


def waited_ns() -> int:
    """How long this process's threads have been ready but without a core; 0 where the kernel does not count that."""
    waited = 0
    for task in Path("/proc/self/task").glob("*"):
        with suppress(OSError, IndexError):  # a thread that has just ended
            waited += int((task / "schedstat").read_bytes().split()[1])
    return waited


def digest(choice: object) -> str:
    """A choice in eight characters, by which two servers are compared."""
    return hashlib.sha256(orjson.dumps(choice, option=orjson.OPT_SORT_KEYS)).hexdigest()[:8]


def cache_key(
    module: nn.Module, specification: ModelSpecification, device: torch.device, precision: str
) -> dict[str, str]:
    """All on which the times of a model depend. The values of its weights change none."""
    described = re.sub(r" at 0x[0-9a-f]+", "", repr(module))  # of a function, which has another address in each process
    structure = [described, *(f"{name} {list(value.shape)}" for name, value in module.state_dict().items())]
    shapes = [f"{tensor.name} {tensor.datatype} {list(tensor.shape)}" for tensor in specification.inputs]
    text = "\n".join([*structure, *shapes, str(specification.definition_sha256)])
    return {
        **machine_key(device),
        "model": specification.label,
        "structure": hashlib.sha256(text.encode()).hexdigest(),
        "precision": precision,
    }


def machine_key(device: torch.device, code: Path = Path(__file__).parent / "torch") -> dict[str, str]:
    """The device, its driver and the versions of all that executes on it, `code`'s folder among them."""
    import torch

    on_gpu = device.type == "cuda"
    return {
        "gpu": torch.cuda.get_device_name(device) if on_gpu else "cpu",
        "driver": _first_line_of("/proc/driver/nvidia/version") if on_gpu else "",
        "processor": "" if on_gpu else processor(),
        "threads": "" if on_gpu else str(torch.get_num_threads()),
        "torch": f"{torch.__version__} {torch.version.cuda}",
        "cudnn": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
        "abserve": version("abserve"),
        "code": code_sha256(code),
    }


def _first_line_of(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return ""


def processor() -> str:
    """The processor's name and instructions."""
    try:
        described = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    return "\n".join(
        sorted(set(re.findall(r"^(?:model name|CPU part|flags|Features)\s*:.*$", described, re.MULTILINE)))
    )


@cache
def code_sha256(folder: Path) -> str:
    """Of the files that say what is chosen among, and how."""
    files = [Path(__file__), *sorted(folder.glob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def choices_wanted(option: str = "stored") -> str:
    """`stored`, `fresh` or `off`, of an option or, where that has its default, of the variable `CHOICES`."""
    return option if option != "stored" else os.environ.get(CHOICES) or "stored"


def makes_choices() -> bool:
    """Whether choices are made; else every model executes in its own form."""
    return choices_wanted() != "off"


def choices_folder() -> Path:
    """Where choices are stored, whether it exists or not."""
    return Path(os.environ.get(PLANS_FOLDER) or user_cache() / "plans")


def stored_choices() -> dict[Path, str]:
    """The files with choices, and the model of each."""
    found = {}
    for path in sorted(choices_folder().glob("*.json")):
        try:
            key = orjson.loads(path.read_bytes())["key"]
            found[path] = str(key.get("model") or "a model of the torch engine")
        except (OSError, ValueError, TypeError, KeyError, AttributeError):
            found[path] = "damaged"
    return found


def clear_stored_choices() -> str | None:
    """Delete the stored choices; why that failed, in one sentence. Starts that choose now are not disturbed."""
    try:
        for path in stored_choices():
            path.unlink(missing_ok=True)
    except OSError as exc:
        return f"The choices in {choices_folder()} cannot be deleted ({exc.strerror}): make the folder writable."
    return None


class ChoiceCache:
    """The choice that was made under one key, in a file of its own; without one that can be read, it is made again.
    Where `fresh` is wanted, only one that was stored since this object was made is read."""

    def __init__(self, key: Mapping[str, str], wanted: str | None = None) -> None:
        self._key = dict(key)
        name = hashlib.sha256(orjson.dumps(self._key, option=orjson.OPT_SORT_KEYS)).hexdigest()
        self._path = choices_folder() / f"{name}.json"
        self._oldest = time() - CLOCK_TICK_SECONDS if (wanted or choices_wanted()) == "fresh" else 0.0
        self.trouble = ""
        """Why the file could not be read or written, and what that means, in one sentence."""

    @contextmanager
    def held(self) -> Iterator[None]:
        """Wait while another start chooses under this key; what it stored can then be read."""
        lock = self._path.with_suffix(".lock")
        try:
            lock.parent.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError:  # `write` says so
            yield
            return
        try:
            deadline = monotonic() + WAIT_SECONDS
            while not _locked(descriptor) and monotonic() < deadline:
                sleep(0.05)
            yield
        finally:
            os.close(descriptor)

    def read(self) -> Mapping[str, Any]:
        """The choice that is stored; empty if there is none, or none that can be read."""
        try:
            if self._path.stat().st_mtime < self._oldest:
                return {}
            document = orjson.loads(self._path.read_bytes())
            if document["key"] == self._key and isinstance(choice := document["choice"], dict):
                return choice if time() < document.get("until", inf) else {}
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, TypeError, KeyError):
            pass
        self.reject()
        return {}

    def reject(self) -> None:
        """Note that the stored choice is damaged."""
        self.trouble = f"The stored choice {self._path} is damaged, so this start measured again."

    def write(self, choice: Mapping[str, Any], *, decided: bool = True) -> None:
        """Keep this choice instead of an earlier one; for `UNDECIDED_SECONDS` if the machine was too busy to decide."""
        until = {} if decided else {"until": time() + UNDECIDED_SECONDS}
        failure = keep_file(self._path, orjson.dumps({"key": self._key, "choice": choice, **until}))
        if failure is not None:
            self.trouble = (
                f"The choice cannot be stored in {self._path.parent} ({failure.strerror}), so another start may choose "
                f"otherwise: make the folder writable, or name another one in {PLANS_FOLDER}."
            )


def _locked(descriptor: int) -> bool:
    """Whether the lock is held now, or the file system has none."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
