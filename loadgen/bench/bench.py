"""The run context of a phase under load: all servers up and warm, with the same answers, and a generator."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.bench.answers import AnswersUnderLoad
from loadgen.bench.arms import Arm
from loadgen.bench.gpu_recording import GpuStage
from loadgen.bench.load_runner import LoadRunner
from loadgen.bench.preparation import Inputs
from loadgen.bench.progress import Progress
from loadgen.experiment.forecast import Forecast
from loadgen.generator.process import GeneratorProcess
from loadgen.records.run import ArmRecord, Cell, Experiment, Label
from loadgen.storage.store import RunStore
from loadgen.storage.stored_run import StoredBlock
from loadgen.transport.endpoint import Signature


@dataclass(frozen=True, slots=True)
class Bench:
    """The context of one start of the servers. It owns nothing: the runner ends what is in it."""

    experiment: Experiment
    store: RunStore
    progress: Progress
    forecast: Forecast
    enter: Callable[[str], None]
    """Begin a phase with this title, in the stored state and on the screen."""
    arms: Mapping[Label, Arm]
    records: Sequence[ArmRecord]
    signatures: Mapping[Label, Signature]
    inputs: Inputs
    samples_folder: Path
    generator: GeneratorProcess
    gpu: GpuStage
    answers: AnswersUnderLoad
    work: Path
    """A temporary folder of the run."""
    abserve: tuple[str, ...]
    """The command that starts servers with other settings."""
    restart: int
    """From 0."""
    done: list[StoredBlock]
    """The run's blocks so far, also of earlier restarts, when their number is not fixed."""
    load_deadline: Callable[[], float]
    """When this restart's load must end, by `time.monotonic`."""

    @property
    def last(self) -> bool:
        """Whether this is the last start of the servers for load."""
        return self.restart + 1 == self.experiment.restarts

    def load_runner(
        self, arms: Mapping[Label, Arm] | None = None, store: RunStore | None = None, *, watched: bool = True
    ) -> LoadRunner:
        """A runner for these arms and this store, by default the run's; only the run's arms have answers kept.
        `watched`: record the GPU."""
        return LoadRunner(
            self.arms if arms is None else arms,
            self.generator,
            self.store if store is None else store,
            self.progress,
            self.gpu.recording if watched else None,
            self.experiment.seed,
            self.answers if arms is None else None,
        )

    def prepare_bodies(self, batch_sizes: Sequence[int]) -> None:
        """Replace the generator's bodies by those of these batch sizes. Raises `GeneratorError`."""
        self.progress.now("preparing request bodies")
        for label in {arm.body_key: label for label, arm in self.arms.items()}.values():
            arm = self.arms[label]
            self.generator.prepare(
                arm.bodies(self.samples_folder, self.signatures[label], batch_sizes, self.experiment.seed)
            )

    def warm_up(self, cells: Sequence[Cell]) -> dict[str, float]:
        """Run every load shape of these cells on every arm. Returns by cell how many seconds a request takes on the
        slowest arm. Raises `LoadError`."""
        return self.load_runner().warm_up(cells)
