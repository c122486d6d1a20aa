"""The servers of a comparison: brought up side by side, asked what they are and whether they agree, taken down.

They can be started again: each restart is a fresh start of all, described and asked anew.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from loadgen.bench.arms import Arm
from loadgen.bench.parity import ParityTarget, check_parity
from loadgen.bench.preparation import READY_SECONDS, Inputs, make_deployment
from loadgen.bench.progress import Progress
from loadgen.invocation import ABSERVE
from loadgen.records.run import ArmRecord, Experiment, Label, ParityRecord, option_of, shown
from loadgen.statistics.agreement import Tolerance
from loadgen.storage.store import RunStore
from loadgen.targets.compose import ComposeDeployment, require_one_way
from loadgen.targets.embedded import EmbeddedDeployment
from loadgen.targets.interface import DeploymentError
from loadgen.transport.endpoint import EndpointError, Signature


class ParityFailedError(Exception):
    """The arms do not compute the same function, so their speed is not compared."""


class ArmServers:
    """The arms of one run. Life: (`start` → `signatures` → `check_parity` → … → `stop`), repeated; `close` at any
    time leaves nothing of ours running and a stack as it was found."""

    def __init__(
        self,
        experiment: Experiment,
        store: RunStore,
        progress: Progress,
        work: Path,
        abserve: Sequence[str] = ABSERVE,
    ) -> None:
        """Starts nothing. Raises `AddressError`, and `DeploymentError` for a stack that is not up."""
        self._experiment = experiment
        self._store = store
        self._progress = progress
        self._resources = ExitStack()
        self._starts = 0
        self.arms: dict[Label, Arm] = {}
        for request in experiment.arms:
            deployment = make_deployment(request, experiment, store, work, abserve)
            model, payload = experiment.model_of(request), experiment.payload_of(request)
            self.arms[request.label] = Arm(request, deployment, model, experiment.transport, payload)
            self._resources.callback(
                deployment.restore if isinstance(deployment, ComposeDeployment) else deployment.stop
            )

    def start(self) -> list[ArmRecord]:
        """All at once, each on fresh ports, each time in the reverse order; returns what is in effect, which is stored
        too. Raises `DeploymentError`."""
        order = list(self.arms.items())
        self._starts += 1
        for label, arm in order if self._starts % 2 else reversed(order):
            self._progress.now(f"{shown(label)}: {arm.request.target}")
            arm.deployment.start()
        require_one_way([arm.deployment for arm in self.arms.values()])
        records = []
        for label, arm in self.arms.items():
            self._progress.now(f"waiting until {shown(label)} ({arm.request.target}) is ready")
            try:
                if isinstance(arm.deployment, ComposeDeployment):
                    asked_for = self._experiment.model_of(arm.request)
                    arm = replace(arm, model=arm.deployment.await_model(asked_for, READY_SECONDS))
                    self.arms[label] = arm
                arm.deployment.wait_ready(arm.model, READY_SECONDS if arm.deployment.launched else 5.0)
                records.append(arm.record())
            except (DeploymentError, EndpointError) as exc:
                raise DeploymentError(f"arm {label} ({arm.request.target}): {exc}") from exc
            self._progress.arm_ready(records[-1])
        self._store.write_all(ArmRecord, records)
        self._require_batch_sizes(records)
        return records

    def _require_batch_sizes(self, records: Sequence[ArmRecord]) -> None:
        """Raises `DeploymentError` where a batch is asked for that a server would refuse, before any load."""
        largest = max((cell.batch_size for cell in self._experiment.cells), default=1)
        limits = {record.label: (record, record.in_effect.get("max_batch_size")) for record in records}
        small = {label: (record, n) for label, (record, n) in limits.items() if isinstance(n, int) and 0 < n < largest}
        if not small:
            return
        taken = " and ".join(f"arm {label} ({record.title}) takes at most {n}" for label, (record, n) in small.items())
        options = " ".join(
            f"{option_of(label, 'option')} max-batch-size={largest}"
            if isinstance(self.arms[label].deployment, EmbeddedDeployment)
            else f"a larger max_batch_size on the server of arm {label}"
            for label in small
        )
        raise DeploymentError(
            f"batches of {largest} are asked for, and {taken}: give {options}, or leave that size out of --batch-sizes"
        )

    def signatures(self) -> dict[Label, Signature]:
        """What the arms take; a difference is a failed parity with its own sentence, but for the inputs of arms that
        are sent different payloads on purpose."""
        inputs_alike = len(self._experiment.payloads) == 1
        signatures = {label: arm.endpoint.signature(arm.model) for label, arm in self.arms.items()}
        interfaces = {
            label: (
                sorted((tensor.name, tensor.datatype) for tensor in signature.inputs if inputs_alike),
                sorted(tensor.name for tensor in signature.outputs),
            )
            for label, signature in signatures.items()
        }
        (first, expected), *others = interfaces.items()
        different = [f"{label} {interface}" for label, interface in others if interface != expected]
        if different:
            message = (
                f"the arms do not serve the same model: {first} takes and gives {expected}, {', '.join(different)}"
            )
            self._store.write(ParityRecord(cases=(), ok=False, error=message))
            raise ParityFailedError(message)
        return signatures

    def check_parity(
        self, inputs: Inputs, signatures: Mapping[Label, Signature], records: Sequence[ArmRecord], tolerance: Tolerance
    ) -> None:
        """Ask all of them for the same images, at each batch size of the load. Raises `ParityFailedError` after storing
        what they answered."""
        self._progress.now(f"{next(iter(inputs.values())).count} images to every server, alone and in mixed batches")
        sizes = [size for record in records if isinstance(size := record.in_effect.get("max_batch_size"), int)]
        used = {cell.batch_size for cell in self._experiment.cells}
        arms = {
            label: ParityTarget(arm.target, signatures[label], inputs[arm.payload]) for label, arm in self.arms.items()
        }
        largest = max(1, min([*sizes, max({8, *used})]))
        record = check_parity(arms, {largest, *(size for size in used if size < largest)}, tolerance)
        self._store.write(record)
        self._progress.parity_done(record)
        if not record.ok:
            failed = ", ".join(
                f"{case.name} (output {case.output}: relative error {case.relative_max or 0.0:.2g}, of one element "
                f"{case.element_max or 0.0:.2g})"
                for case in record.cases
                if not case.ok
            )
            raise ParityFailedError(
                f"the arms do not give the same answers, so their speed is not compared: {record.error or failed}"
            )

    def stop(self) -> None:
        """End what is ours; a stack's containers stop too and can be started again."""
        for arm in self.arms.values():
            arm.deployment.stop()

    def close(self) -> None:
        """Idempotent."""
        self._resources.close()
