"""The reference for an answer: transformers' own modules, which read prompt and answer at once (teacher forcing).

Equal answers are the wrong test. In BF16 two right engines soon choose different tokens, and all that follows differs.
So each token is judged by the answer's own beginning: its deficit is how far its logit is below the largest one there,
0 for the reference's own choice. The reference disagrees with itself, too, when sums are in another order; its `noise`
is the largest deficit that this causes.

In a mixture of experts rounding exchanges experts now and then, and a token of a right engine may be far below the
best. So a mixture is read twice: in FP32, which gives the deficits, and in the precision that is served. What the
second reading chooses has deficits, too: those that the right model has in that precision, place by place.

A batch is padded at its end, where causal attention never looks from an answer's own tokens: no mask is needed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from servers.language.engine import generation_precision
from servers.language.module import DTYPES, build_module
from servers.language.specification import LanguageModel, language_model
from servers.language.weights import weights_sha256
from servers.options.defaults import OptionError

if TYPE_CHECKING:
    import torch

LOGIT_BYTES = 2**29
"""The most memory of the logits of one forward pass, FP32; their copies take as much again."""
BATCH_TOKENS = 16_384
"""The most tokens of one forward pass, padding included."""
_REREAD_ANSWERS, _REREAD_TOKENS = 8, 64
"""So many answers, and so many tokens of each, are read again to measure the noise."""


@dataclass(frozen=True, slots=True)
class GivenAnswer:
    """Token ids of a prompt, at least one, and of its answer, at least one."""

    prompt: Sequence[int]
    output: Sequence[int]

    @property
    def read(self) -> list[int]:
        """What the model reads to choose every token of the answer."""
        return [*self.prompt, *self.output[:-1]]


@dataclass(frozen=True, slots=True)
class JudgedAnswer:
    """The reference's view of an answer, by token: the deficit of the chosen one and the reference's own choice.
    `largest` is the largest absolute logit at any of its tokens, the scale of a deficit; `random` is the mean deficit
    of a token chosen at random."""

    deficits: Sequence[float]
    best: Sequence[int]
    largest: float
    random: float


def judge_answers(document: Any) -> dict[str, Any]:
    """The document that `abserve language-reference` writes for the one that it reads. Raises `OptionError`,
    `WeightsError` and `UnknownModelError`."""
    started = time.perf_counter()
    if not isinstance(document, dict) or not isinstance(document.get("model"), str):
        raise OptionError("the file is not an object that names its model")
    model = language_model(document["model"], document.get("weights"))
    answers = _answers(document, model)
    precision, device = _precision(document.get("precision") or "auto", document.get("device") or "auto")
    module = build_module(model, device, precision)
    mixture = bool(getattr(module.config.get_text_config(), "num_local_experts", None))
    noise: Sequence[Sequence[float]] = [()] * len(answers)
    if mixture:
        rounded = [judgement.best for judgement in judge(module, answers)]
        with computing_in_fp32(module):
            judgements = judge(module, answers)
            noise = [judgement.deficits for judgement in judge(module, answers, rounded)]
    else:
        judgements = judge(module, answers)
    return {
        "answers": [
            {
                "deficits": judgement.deficits,
                "best": judgement.best,
                "largest": judgement.largest,
                "random": judgement.random,
                "noise": of_answer,
            }
            for judgement, of_answer in zip(judgements, noise, strict=True)
        ],
        "noise": own_noise(module, answers),
        "mixture": mixture,
        "eos": model.eos,
        "precision": precision,
        "compute": "fp32" if mixture else precision,
        "device": device,
        "weights": model.weights.label,
        "weights_sha256": weights_sha256(model.weights, model.fields),
        "seconds": time.perf_counter() - started,
    }


def judge(
    module: Any, answers: Sequence[GivenAnswer], choices: Sequence[Sequence[int]] | None = None
) -> list[JudgedAnswer]:
    """Each answer's judgement, in the order of the answers. With `choices` those tokens are judged at the places of the
    answers', which the module reads all the same."""
    judgements: dict[int, JudgedAnswer] = {}
    for batch in batches(answers, module.config.vocab_size):
        deficits: dict[int, list[float]] = {index: [] for index in batch}
        best: dict[int, list[int]] = {index: [] for index in batch}
        largest, random = dict.fromkeys(batch, 0.0), dict.fromkeys(batch, 0.0)
        for start, logits in _logits(module, [answers[index] for index in batch]):
            for row, index in enumerate(batch):
                answer, judged = answers[index], len(best[index])
                scores = _of_answer(logits[row], start, answer)
                if len(scores):
                    tokens = answer.output if choices is None else choices[index]
                    deficits[index] += _deficits(scores, tokens[judged : judged + len(scores)])
                    best[index] += scores.argmax(1).tolist()
                    largest[index] = max(largest[index], float(scores.abs().max()))
                    random[index] += float((scores.max(1).values - scores.mean(1)).sum())
        judgements |= {
            index: JudgedAnswer(
                deficits[index], best[index], largest[index], random[index] / len(answers[index].output)
            )
            for index in batch
        }
    return [judgements[index] for index in range(len(answers))]


@contextmanager
def computing_in_fp32(module: Any) -> Iterator[None]:
    """Let the module compute in FP32 with the numbers that its parameters have in their own precision. Each part has
    FP32 copies of its parameters only while it computes, so the memory of the whole model is taken once more for its
    largest part alone: of gpt-oss-20b 3 GB instead of 84."""
    kept: dict[Any, dict[str, Any]] = {}

    def widen(part: Any, _: object) -> None:
        kept[part] = dict(part._parameters)
        for name, parameter in kept[part].items():
            if parameter is not None:
                part._parameters[name] = parameter.float()

    def restore(part: Any, _: object, __: object) -> None:
        part._parameters.update(kept.pop(part))

    parts = [part for part in module.modules() if any(True for _ in part.parameters(recurse=False))]
    hooks = [
        hook
        for part in parts
        for hook in (part.register_forward_pre_hook(widen), part.register_forward_hook(restore, always_call=True))
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def own_noise(module: Any, answers: Sequence[GivenAnswer]) -> float:
    """The largest deficit of a token that the reference itself chooses when it reads an answer otherwise: alone instead
    of in a batch, and token by token with a cache as engines do. 0 without answers. Measured on the beginnings of a few
    answers of the most usual length."""
    import torch

    beginnings = [GivenAnswer(answer.prompt, answer.output[:_REREAD_TOKENS]) for answer in answers]
    groups = batches(beginnings, module.config.vocab_size)
    rows = [beginnings[index] for index in max(groups, key=len, default=[])][:_REREAD_ANSWERS]
    noise = 0.0
    together = list(_logits(module, rows)) if rows else []
    for row, answer in enumerate(rows):
        expected = torch.cat([_of_answer(logits[row], start, answer) for start, logits in together])
        alone = [_of_answer(logits[0], start, answer) for start, logits in _logits(module, [answer])]
        others = [torch.cat(alone), *([_decoded(module, answer)] if row == 0 else [])]
        noise = max([noise, *(max(_deficits(expected, scores.argmax(1).tolist())) for scores in others)])
    return noise


def batches(answers: Sequence[GivenAnswer], vocabulary: int) -> list[list[int]]:
    """The answers' indices in batches of similar lengths, each within `BATCH_TOKENS` and `LOGIT_BYTES`; one answer that
    exceeds them has a batch of its own."""
    order = sorted(range(len(answers)), key=lambda index: (len(answers[index].prompt), len(answers[index].read)))
    groups: list[list[int]] = []
    shortest = longest = 0
    for index in order:
        answer = answers[index]
        rows = len(groups[-1]) + 1 if groups else 1
        first, last = min(shortest, len(answer.prompt)), max(longest, len(answer.read))
        logit_bytes = rows * (last - first + 1) * vocabulary * 4
        if groups and rows * last <= BATCH_TOKENS and logit_bytes <= LOGIT_BYTES:
            groups[-1].append(index)
            shortest, longest = first, last
        else:
            groups.append([index])
            shortest, longest = len(answer.prompt), len(answer.read)
    return groups


def _logits(module: Any, rows: Sequence[GivenAnswer]) -> Iterator[tuple[int, torch.Tensor]]:
    """The logits of a batch, FP32 [rows, n, vocabulary], from the first position that chooses a token of an answer to
    the last, in one part or in several; each with its first position."""
    import torch

    width = max(len(answer.read) for answer in rows)
    ids = torch.zeros((len(rows), width), dtype=torch.int64)
    for row, answer in enumerate(rows):
        ids[row, : len(answer.read)] = torch.tensor(answer.read)
    ids = ids.to(module.device)
    first = min(len(answer.prompt) for answer in rows) - 1
    step = max(1, LOGIT_BYTES // (len(rows) * module.config.vocab_size * 4))
    for start in range(first, width, step):
        positions = torch.arange(start, min(start + step, width), device=module.device)
        with torch.inference_mode():
            yield start, module(input_ids=ids, use_cache=False, logits_to_keep=positions).logits.float()


def _of_answer(logits: torch.Tensor, start: int, answer: GivenAnswer) -> torch.Tensor:
    """Of a row's logits, [n, vocabulary] from position `start`, those that choose tokens of the answer."""
    return logits[max(len(answer.prompt) - 1 - start, 0) : max(len(answer.read) - start, 0)]


def _decoded(module: Any, answer: GivenAnswer) -> torch.Tensor:
    """The logits of an answer's tokens, FP32 [n, vocabulary], from reading the prompt and then token after token."""
    import torch

    def read(ids: Sequence[int], cache: Any) -> Any:
        return module(input_ids=torch.tensor([list(ids)], device=module.device), past_key_values=cache, use_cache=True)

    with torch.inference_mode():
        result = read(answer.prompt, None)
        scores = [result.logits[0, -1].float()]
        for token in answer.output[:-1]:
            result = read([token], result.past_key_values)
            scores.append(result.logits[0, -1].float())
    return torch.stack(scores)


def _deficits(scores: torch.Tensor, chosen: Sequence[int]) -> list[float]:
    """How far the logit of each chosen token is below the largest; `scores` are FP32 [n, vocabulary]."""
    import torch

    ids = torch.tensor(list(chosen), device=scores.device)
    deficits: list[float] = (scores.max(1).values - scores.gather(1, ids[:, None])[:, 0]).tolist()
    return deficits


def _precision(precision: str, device: str) -> tuple[str, str]:
    """The precision and the device that are meant; auto: BF16 on a GPU if there is one, FP32 on a CPU."""
    import torch

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    precision = generation_precision(precision, device)
    if precision not in DTYPES:
        raise OptionError(f"precision {precision!r} is not one of {', '.join(DTYPES)}")
    return precision, device


def _answers(document: Any, model: LanguageModel) -> list[GivenAnswer]:
    """The answers of a document. Raises `OptionError` for one that the model cannot have given."""
    listed = document.get("answers") if isinstance(document, Mapping) else None
    if not isinstance(listed, list):
        raise OptionError("the file has no list of answers")
    answers = []
    for number, entry in enumerate(listed):
        prompt, output = (_ids(entry, key, model.vocabulary) for key in ("prompt", "output"))
        if not prompt or not output:
            raise OptionError(
                f"answer {number}: prompt and output must be lists of token ids below {model.vocabulary}, none empty"
            )
        if len(prompt) + len(output) > model.max_length + 1:
            raise OptionError(
                f"answer {number}: prompt and output have {len(prompt) + len(output)} tokens, more than the model's "
                f"{model.max_length}"
            )
        answers.append(GivenAnswer(prompt, output))
    return answers


def _ids(entry: object, key: str, vocabulary: int) -> list[int]:
    """The token ids of an answer's part; empty if it has something else."""
    value = entry.get(key) if isinstance(entry, Mapping) else None
    if not isinstance(value, list) or not all(isinstance(item, int) and 0 <= item < vocabulary for item in value):
        return []
    return value
