"""What a phase under load works with: all servers up, alike in their answers and warmed, and a generator at hand."""

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
    """One restart of the servers. It lends everything and owns nothing: the runner ends what is in it."""

    experiment: Experiment
    store: RunStore
    progress: Progress
    forecast: Forecast
    enter: Callable[[str], None]
    """A phase begins, by its title: on disk and on the screen."""
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
    """The command that starts servers, for a phase that needs one with other settings."""
    restart: int
    """From 0."""
    done: list[StoredBlock]
    """Blocks of this run's load, those of earlier restarts too, where their number is not fixed."""
    load_deadline: Callable[[], float]
    """The moment, of `time.monotonic`, by which this restart's load is to end."""

    @property
    def last(self) -> bool:
        """Whether the servers are not started again for load after this."""
        return self.restart + 1 == self.experiment.restarts

    def load_runner(
        self, arms: Mapping[Label, Arm] | None = None, store: RunStore | None = None, *, watched: bool = True
    ) -> LoadRunner:
        """Loads these arms, by default this run's own, whose answers are kept for the comparison; `store` is where
        records go. `watched`: with the GPU beside."""
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
        """Make the generator's bodies of these batch sizes, in place of those that it has. Raises
        `GeneratorError`."""
        self.progress.now("preparing request bodies")
        for label in {arm.body_key: label for label, arm in self.arms.items()}.values():
            arm = self.arms[label]
            self.generator.prepare(
                arm.bodies(self.samples_folder, self.signatures[label], batch_sizes, self.experiment.seed)
            )

    def warm_up(self, cells: Sequence[Cell]) -> dict[str, float]:
        """Every load shape of these cells on every arm, outside any window; how many seconds a request of each takes on
        the slower arm. Raises `LoadError`."""
        return self.load_runner().warm_up(cells)
