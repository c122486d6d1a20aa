"""Proves the answers of a language model: a probe of every arm before the load, and a reference after it.

**Before the load** every arm answers a few prompts, or its speed is not compared: with as many tokens as asked for, to
the prompt that was sent. Two right engines need not give equal answers, so the answers are kept for the reference.

**Under load** the generator keeps a random sample of each block's answers (`KeptAnswers`). When all servers are
stopped, `abserve language-reference` reads each answer with transformers' own modules, and the checks judge how far
each token is below the best one at its place.
"""

from __future__ import annotations

import hashlib
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Self

import msgspec
import numpy as np

from loadgen.base.documents import last_line, one_line
from loadgen.client.connection import AddressError, ConnectionRefused
from loadgen.client.generation import StreamedAnswer, TokenId
from loadgen.client.messages import BlockOutcome, Open
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.traffic import unpacked
from loadgen.experiment.prompts import SETTLING, PromptPlan, PromptShape
from loadgen.measure.answers import AnswersUnderLoad
from loadgen.measure.arms import Arm
from loadgen.measure.errors import RunError
from loadgen.measure.language import probe_prompts
from loadgen.records.payloads import is_language
from loadgen.records.probes import ReferenceAnswer, TokensCompared
from loadgen.records.run import MODEL_WEIGHTS, Experiment, Label, Workload, body_in_words, option_of
from loadgen.records.targets import ROUTES

PROBE_PROMPTS = 4
PROBE_TOKENS = 16
"""The longest answer to a prompt of the probe; the load's are shorter at most."""
FIRST_PROMPTS = 16
"""More prompts of the probe, as short as those that settle a connection: only how their answers begin matters."""
PROBE = "probe"
"""The workload of the probe's answers in the records."""
MOST_JUDGED_TOKENS = 300_000
"""Of all answers and their prompts that the reference reads, so that it takes minutes at most on a CPU."""
UNKNOWN_TOKEN = 1e9
"""The deficit of an id that the model does not have."""
_REFERENCE_SECONDS = 1800.0

Logit = Annotated[float, msgspec.Meta(ge=0.0)]


@dataclass(frozen=True, slots=True)
class PromptedAnswer:
    """One answer with its prompt, and where it comes from."""

    workload: str
    label: Label
    restart: int
    block: str
    request: int
    user: int
    prompt: Sequence[int]
    output: Sequence[int]


@dataclass(frozen=True, slots=True)
class AnswerBeginning:
    """How an arm begins its answer to a prompt of the probe."""

    label: Label
    restart: int
    request: int
    first: int | None
    """The first id; None if it sends none."""
    text: str

    def agrees(self, other: AnswerBeginning) -> bool | None:
        """Whether both begin alike; None if one has neither an id nor a text. Servers may send more or less text at
        once, so that one text is the beginning of the other."""
        if self.first is not None and other.first is not None:
            return self.first == other.first
        shorter, longer = sorted((self.text.strip(), other.text.strip()), key=len)
        return longer.startswith(shorter) if shorter else None


class JudgedTokens(msgspec.Struct, frozen=True, kw_only=True):
    """The reference's view of one answer: a value per token. Empty without a reference."""

    deficits: tuple[Logit | None, ...] = ()
    """None: not a number."""
    best: tuple[TokenId, ...] = ()
    largest: Logit = 0.0
    random: Logit = 0.0
    noise: tuple[Logit, ...] = ()
    """Of a mixture: deficits of what the reference chooses in the precision that is served."""

    def beside(
        self, output: Sequence[int], ends: Sequence[int], *, block: str, request: int, user: int
    ) -> ReferenceAnswer:
        """The record of an answer with this judgement. `ends` are the ids that end a text. Raises `ValueError` if the
        reference has judged another number of tokens."""
        digest = hashlib.sha256(np.asarray(output, dtype="<i8").tobytes()).hexdigest()[:16]
        answer = ReferenceAnswer(block=block, request=request, user=user, tokens=len(output), digest=digest)
        if not self.deficits or not output:
            return answer
        if not len(output) == len(self.deficits) == len(self.best):
            raise ValueError(f"the reference judged {len(self.deficits)} of {len(output)} tokens")
        deficits = np.nan_to_num(np.array(self.deficits, dtype=np.float64), nan=np.inf, posinf=np.inf)
        place = int(np.argmax(deficits))
        chosen, best = np.asarray(output), np.asarray(self.best)
        return msgspec.structs.replace(
            answer,
            deficit=min(float(deficits[place]), UNKNOWN_TOKEN),
            place=place,
            chosen=int(chosen[place]),
            best=int(best[place]),
            largest=self.largest,
            mean=min(float(deficits.mean()), UNKNOWN_TOKEN),
            noise=float(np.mean(self.noise)) if self.noise else None,
            random=self.random,
            other=int((chosen != best).sum()),
            masked_ends=int(((chosen != best) & np.isin(best, list(ends))).sum()),
        )


class ReferenceDocument(msgspec.Struct, frozen=True, kw_only=True):
    """What `abserve language-reference` writes. Other fields in it are ignored."""

    answers: tuple[JudgedTokens, ...]
    noise: Logit | None
    eos: tuple[TokenId, ...]
    weights_sha256: str = ""

    @classmethod
    def empty(cls, answers: int) -> Self:
        """The view of so many answers without a reference."""
        return cls(answers=(JudgedTokens(),) * answers, noise=None, eos=())

    def fields(self, precision: str, error: str | None) -> dict[str, Any]:
        """The fields of `JudgedAnswers` that all answers of one reference share."""
        means = [sum(answer.noise) / len(answer.noise) for answer in self.answers if answer.noise]
        return {
            "precision": precision,
            "noise": self.noise,
            "mean_noise": sum(means) / len(means) if means else None,
            "most_noise": max(means, default=None),
            "weights_sha256": self.weights_sha256,
            "error": error,
        }


@dataclass(slots=True)
class TokenAnswers(AnswersUnderLoad):
    """The answers of a language model that are kept: those of the probe, and some of every block of the run."""

    restart: int = 0
    prompted: list[PromptedAnswer] = field(default_factory=list)
    beginnings: list[AnswerBeginning] = field(default_factory=list)

    def begin(self) -> None:
        """Store an empty record, so that a run that ends before the comparison shows that it is missing. Raises
        `StorageError`."""
        self.store.write_all(TokensCompared, [])

    def take(self, workload: Workload, label: Label, block: str, command: Open, outcome: BlockOutcome) -> None:  # noqa: ARG002 (of tensors)
        """Take over the answers that a block has kept."""
        self.kept[workload.name, label] += len(outcome.answers)
        for answer in outcome.answers:
            ids = {tensor.name: unpacked(tensor)[0].tolist() for tensor in answer.outputs}
            self.prompted.append(
                PromptedAnswer(
                    workload.name, label, self.restart, block, answer.request, answer.user, ids["prompt"], ids["tokens"]
                )
            )  # fmt: skip

    def judge(self, experiment: Experiment, folder: Path, abserve: Sequence[str]) -> None:
        """Have the reference judge the answers, and store how far their tokens are below its best ones; there is none
        of a model of which only a name on servers is known. `folder` gets the files for the reference. Raises
        `StorageError`."""
        chosen = within_limit(self.prompted)
        document, error = ReferenceDocument.empty(len(chosen)), None
        try:
            if is_language(experiment.model) and chosen:
                weights = None if experiment.weights == MODEL_WEIGHTS else experiment.weights
                asked = [(answer.prompt, answer.output) for answer in chosen]
                document = ask_reference(asked, experiment.model, weights, self.tolerance.precision, folder, abserve)
        except RunError as exc:
            error = str(exc)
        groups: dict[tuple[str, Label, int], list[ReferenceAnswer]] = {}
        for answer, judged in zip(chosen, document.answers, strict=True):
            compared = judged.beside(
                answer.output, document.eos, block=answer.block, request=answer.request, user=answer.user
            )
            groups.setdefault((answer.workload, answer.label, answer.restart), []).append(compared)
        shared = document.fields(self.tolerance.precision, error)
        agreed = agreement(self.beginnings, experiment)
        records = []
        for key in dict.fromkeys([*groups, *agreed]):
            workload, label, restart = key
            firsts, equal = agreed.get(key, (None, 0))
            answers = tuple(groups.get(key, ()))
            records.append(
                TokensCompared(
                    workload=workload, label=label, restart=restart, answers=answers, firsts=firsts,
                    equal_firsts=equal, **shared,
                )
            )  # fmt: skip
        self.store.write_all(TokensCompared, records)


def agreement(
    beginnings: Sequence[AnswerBeginning], experiment: Experiment
) -> dict[tuple[str, Label, int], tuple[int, int]]:
    """By the key of each arm's record of the probe, how many first tokens can be compared with the baseline's, and how
    many are equal. Arms that read text and arms that read ids get other prompts, which are not compared."""
    baseline = experiment.baseline
    transports = {arm.label: experiment.transport_of(arm) for arm in experiment.arms}
    forms = {label: name if ROUTES[name].is_text else "ids" for label, name in transports.items()}
    of_baseline = {(each.restart, each.request): each for each in beginnings if each.label == baseline.label}
    counts = {
        (PROBE, arm.label, restart): (0, 0)
        for arm in experiment.arms
        for restart in dict.fromkeys(each.restart for each in beginnings)
        if arm.label != baseline.label
    }
    for each in beginnings:
        key = PROBE, each.label, each.restart
        other, count = of_baseline.get((each.restart, each.request)), counts.get(key)
        if count is None or other is None or forms[each.label] != forms[baseline.label]:
            continue
        agrees = each.agrees(other)
        counts[key] = count[0] + (agrees is not None), count[1] + (agrees is True)
    return counts


def within_limit(answers: Sequence[PromptedAnswer], most_tokens: int = MOST_JUDGED_TOKENS) -> list[PromptedAnswer]:
    """The answers that the reference judges: of every workload and arm alike, as many as the limit allows, and at
    least one. They are spread over all blocks, since a server may begin to answer wrongly later."""
    groups: dict[tuple[str, Label, int], list[PromptedAnswer]] = {}
    for answer in answers:
        groups.setdefault((answer.workload, answer.label, answer.restart), []).append(answer)
    chosen, left = [], most_tokens
    for number, together in enumerate(zip_longest(*map(_spread, groups.values()))):
        for answer in filter(None, together):
            if number == 0 or left > 0:
                chosen.append(answer)
                left -= len(answer.prompt) + len(answer.output)
    return chosen


def _spread(answers: Sequence[PromptedAnswer]) -> list[PromptedAnswer]:
    """In an order of which every beginning is spread over all: the first, that in the middle, those in the middles of
    both halves, and so on (van der Corput's sequence)."""
    bits = (len(answers) - 1).bit_length()
    return [answers[place] for place in sorted(range(len(answers)), key=lambda place: f"{place:0{bits}b}"[::-1])]


def ask_reference(
    answers: Sequence[tuple[Sequence[int], Sequence[int]]],
    model: str,
    weights: str | None,
    precision: str,
    folder: Path,
    abserve: Sequence[str],
    device: str = "auto",
) -> ReferenceDocument:
    """Run `abserve language-reference` on prompts with their answers. Raises `RunError` when it fails, or judges other
    answers."""
    asked, told = folder / "reference-in.json", folder / "reference-out.json"
    document = {
        "model": model,
        "weights": weights,
        "precision": precision,
        "device": device,
        "answers": [{"prompt": list(prompt), "output": list(output)} for prompt, output in answers],
    }
    try:
        asked.write_bytes(msgspec.json.encode(document))
        command = [*abserve, "language-reference", "--in", str(asked), "--out", str(told)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=_REFERENCE_SECONDS)
        if done.returncode != 0:
            raise RunError(f"the reference failed: {last_line(done.stderr)}")
        judged = msgspec.json.decode(told.read_bytes(), type=ReferenceDocument)
    except subprocess.TimeoutExpired:
        raise RunError(f"the reference took longer than {_REFERENCE_SECONDS:g} s") from None
    except (OSError, ValueError) as exc:
        raise RunError(f"the reference cannot be read: {one_line(str(exc), 300)}") from exc
    lengths = [(len(judgement.deficits), len(judgement.best)) for judgement in judged.answers]
    if lengths != [(len(output), len(output)) for _, output in answers]:
        raise RunError("the reference judged other answers than it was asked for")
    return judged


# The probe before the load


@dataclass(frozen=True, slots=True)
class ProbePrompts:
    """The prompts of one probe, the same for every arm, and new in each."""

    plan: PromptPlan
    shape: PromptShape
    whole: Sequence[Sequence[int]]
    """Those whose answers are kept for the reference."""
    short: Sequence[Sequence[int]]
    """Those of whose answers only the beginning matters."""

    @classmethod
    def of(cls, plan: PromptPlan, *, is_short: bool) -> Self:
        """New prompts; without the short ones if `is_short`, as in a screening, whose time is dear."""
        shape = min(plan.shapes, key=lambda shape: shape.prompt_tokens)
        whole = PromptShape(shape.prompt_tokens, min(shape.output_tokens, PROBE_TOKENS), shape.shared_prefix)
        return cls(
            plan,
            whole,
            probe_prompts(plan, whole, PROBE_PROMPTS),
            probe_prompts(plan, SETTLING, 0 if is_short else FIRST_PROMPTS),
        )

    def ask(self, label: Label, arm: Arm, restart: int) -> tuple[list[PromptedAnswer], list[AnswerBeginning]]:
        """Send them to an arm, one at a time. Raises `RunError` for an arm that does not answer them as asked; of the
        short ones an answer that does not come is only missing."""
        prompted, beginnings = _answers_of(label, arm, self.plan, self.whole, self.shape.output_tokens, restart)
        for number, prompt in enumerate(self.short, start=len(self.whole)):
            with suppress(AnswerError, ConnectionRefused):
                answer = ask_tokens(
                    arm.target, self.plan, prompt, SETTLING.output_tokens, timeout_s=_timeout_s(arm), of_any_length=True
                )
                beginnings.append(_beginning(label, restart, number, answer))
        return prompted, beginnings


def _timeout_s(arm: Arm) -> float:
    return max(arm.request_timeout_s, 120.0)


def _beginning(label: Label, restart: int, number: int, answer: StreamedAnswer) -> AnswerBeginning:
    return AnswerBeginning(label, restart, number, answer.ids[0] if answer.ids else None, answer.text)


def _answers_of(
    label: Label, arm: Arm, plan: PromptPlan, prompts: Sequence[Sequence[int]], tokens: int, restart: int
) -> tuple[list[PromptedAnswer], list[AnswerBeginning]]:
    answers, beginnings = [], []
    for number, prompt in enumerate(prompts):
        try:
            answer = ask_tokens(arm.target, plan, prompt, tokens, timeout_s=_timeout_s(arm))
        except (AnswerError, ConnectionRefused, AddressError) as exc:
            changes = f"; it was asked {body_in_words(arm.request.body)}" if arm.request.body else ""
            if "finish reason stop" in str(exc):
                changes += f"; add a field that keeps it from ending early with {option_of(label, 'body')}"
            raise RunError(
                f"{arm.name} does not answer the prompts of the probe as asked ({len(prompt)} → {tokens} tokens): "
                f"{exc}{changes}{arm.failure_message()}",
                label,
            ) from exc
        same = answer.prompt_ids == list(prompt)
        reads_text = ROUTES[arm.transport].is_text  # and makes its own tokens of it
        if answer.prompt_ids is not None and not same and not reads_text:
            raise RunError(
                f"{arm.name} answers another prompt than the one that was sent: it reads {len(answer.prompt_ids)} "
                f"tokens, not {len(prompt)} of these ids; turn off templates and truncation on that server",
                label,
            )
        if answer.has_ids:  # the text of so long an answer is seldom equal
            beginnings.append(_beginning(label, restart, number, answer))
        if answer.has_ids and (same or not reads_text):
            answers.append(PromptedAnswer(PROBE, label, restart, "probe", number, 0, prompt, answer.ids))
    return answers, beginnings


def equal_answers(answers: Sequence[PromptedAnswer], names: Mapping[Label, str]) -> str:
    """How many answers of the probe are the same ids on every arm, for the screen."""
    by_prompt: dict[int, set[tuple[int, ...]]] = {}
    for answer in answers:
        by_prompt.setdefault(answer.request, set()).add(tuple(answer.output))
    silent = [name for label, name in names.items() if not any(answer.label == label for answer in answers)]
    equal = sum(len(outputs) == 1 for outputs in by_prompt.values())
    words = f"{equal} of {len(by_prompt)} probe answers have the same ids on every arm"
    return words + (f"; {' and '.join(silent)} sent no ids" if silent else "")
