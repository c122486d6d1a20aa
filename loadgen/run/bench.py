"""What a phase under load works with: both servers up, alike in their answers and warmed, and a generator at hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadgen.clients.endpoint import Signature
from loadgen.experiment.forecast import Forecast
from loadgen.generator.process import GeneratorProcess
from loadgen.records.run import ArmRecord, Cell, Experiment, Label
from loadgen.run.arms import Arm
from loadgen.run.gpu_stage import GpuStage
from loadgen.run.load_phase import LoadPhase
from loadgen.run.preparation import Inputs
from loadgen.run.progress import Progress
from loadgen.storage.store import RunStore


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
    work: Path
    """A temporary folder of the run."""
    abserve: tuple[str, ...]
    """The command that starts servers, for a phase that needs one with other settings."""
    restart: int
    """From 0."""

    @property
    def last(self) -> bool:
        """Whether the servers are not started again for load after this."""
        return self.restart + 1 == self.experiment.restarts

    def load_phase(self, arms: Mapping[Label, Arm] | None = None, store: RunStore | None = None) -> LoadPhase:
        """Runs blocks, on these arms unless others are given; `store` is where they go."""
        return LoadPhase(
            self.arms if arms is None else arms,
            self.generator,
            self.store if store is None else store,
            self.progress,
            self.gpu.recording,
            self.experiment.seed,
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

    def warm_up(self, cells: Sequence[Cell]) -> None:
        """Every load shape of these cells on every arm, outside any window. Raises `LoadError`."""
        LoadPhase(self.arms, self.generator, self.store, self.progress).warm_up(cells)
