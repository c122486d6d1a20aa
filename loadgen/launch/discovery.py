"""The model of servers at URLs when none was named, and whether it streams tokens: by what each of them lists."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from secrets import token_hex
from time import monotonic, sleep
from typing import NamedTuple

from loadgen.base.documents import one_line
from loadgen.base.headers import HIDDEN, secrets_in
from loadgen.client.connection import Address, AddressError, ConnectionRefused
from loadgen.client.endpoint import (
    CompletionsEndpoint,
    Endpoint,
    EndpointError,
    IndexRow,
    answer_text,
    model_names,
    nothing_ready,
    ready_models,
    unmeasurable,
)
from loadgen.client.generation import PROMPT_FORMS, RequestBody, request_fields, takes_salt
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.transports import InferenceTarget
from loadgen.experiment.prompts import SETTLING, UNKNOWN_IDS, PromptPlan
from loadgen.launch.deployment import (
    REFUSED_ACCESS,
    RUNNING_READY_SECONDS,
    DeploymentError,
    RemoteDeployment,
    access_remedy,
    tls_remedy,
)
from loadgen.records.run import TOKENS_PLACE, ArmRequest, Label, body_in_words, option_of, shown
from loadgen.records.targets import TokenTransport

_MOST_COMMANDS = 8
_MOST_MODELS = 8
"""Most models of a server that are asked whether they stream."""
_PROMPT_SECONDS = 120.0
"""How long a server may be silent before its first answer: some load a model only then."""
_MOST_EXTRA = 2
"""Tokens beyond those asked for that a server may count, such as one that begins or ends the text."""
_POLL_SECONDS = 0.1
_WIDEST = 60
"""Characters of a table's first column."""
_MULTIPLE_CHOICES, _BAD_REQUEST, _NOT_FOUND, _TOO_MANY, _SERVER_ERROR = 300, 400, 404, 429, 500
_REFUSED_FIELDS = (400, 422, 500)
"""How servers answer fields that they do not know; the last is what an error in their code makes of it."""
_NO_FURTHER = (401, 407)
_BROKEN = ("connection", "malformed")
"""How the failure of a request begins whose server may answer another one."""
_OTHER_FAULTS = {0, _NOT_FOUND, _TOO_MANY, *REFUSED_ACCESS}
_MAY_BE_STARTING = (0, 502, 503, 504)


def find_models(arms: Sequence[ArmRequest], preferred: str) -> tuple[Mapping[Label, str], tuple[str, ...]]:
    """The model that all servers have in common, `preferred` if that is one, by its name on each arm's server; and what
    was chosen, and what the servers choose themselves. Arms that name theirs are not asked. A server that lists no
    models is asked for each of the others'. Raises `DeploymentError` if the choice is the user's, with the commands to
    choose by."""
    named = {arm.label: arm.model for arm in arms if arm.model is not None}
    asking = [arm for arm in arms if arm.model is None]
    servers = {
        arm.label: RemoteDeployment(arm.target, access=arm.access, model_option=option_of(arm.label, "model"))
        for arm in asking
    }
    rows = {arm.label: _rows(servers[arm.label], arm) for arm in asking}
    listed: dict[Label, Sequence[str]] = {
        label: ready_models(of_arm) for label, of_arm in rows.items() if of_arm is not None
    }
    candidates = {*[preferred], *named.values(), *(name for names in listed.values() for name in names)}
    for arm in asking:
        if rows[arm.label] is None:
            listed[arm.label] = [name for name in sorted(candidates) if servers[arm.label].endpoint().ready(name)]
            if not listed[arm.label]:
                raise DeploymentError(
                    f"{option_of(arm.label)} {arm.target} does not list its models, and has none of those known here; "
                    f"add {option_of(arm.label, 'model')} NAME, as that server calls it"
                )
        elif not listed[arm.label]:
            raise DeploymentError(f"{option_of(arm.label)}: {nothing_ready(arm.target, rows[arm.label] or ())}")
    names = dict(named)
    if listed:
        common = sorted(set.intersection(*map(set, listed.values())))
        wanted = next((name for name in (*named.values(), preferred) if name in common), None)
        if wanted is None and len(common) != 1:
            raise DeploymentError(_to_choose(arms, common, listed))
        names |= dict.fromkeys(listed, wanted or common[0])
    return names, _notes(arms, names, named, rows, preferred)


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The language model of a server at a URL."""

    model: str
    bodies: dict[TokenTransport, RequestBody]
    """The protocols in which it takes prompts, each with the fields that differ from the usual ones."""
    notes: tuple[str, ...] = ()
    """What was chosen among its models."""


class Refusal(NamedTuple):
    """Why a server did not answer a question. The status is HTTP's; 0: there was no answer."""

    status: int
    words: str


_NOT_ASKED = Refusal(0, "")


@dataclass(slots=True)
class AskedServer:
    """A server at a URL, and what it has said to each question."""

    arm: ArmRequest
    said: list[tuple[str, str]] = field(default_factory=list)
    cards: tuple[IndexRow, ...] | None = None
    """The language models that it lists as OpenAI's API does; None if it has no such list."""
    decoupled: tuple[str, ...] = ()
    """Its models of the Open Inference Protocol that stream."""
    speaks_v2: bool = False
    refusal: Refusal = _NOT_ASKED
    """Why it has listed no language model."""

    @property
    def lists_models(self) -> bool:
        return bool(self.cards or self.decoupled)

    @property
    def is_of_tensors(self) -> bool:
        """Whether it speaks the Open Inference Protocol and has no list of language models; one that refuses to show
        its list may have one."""
        return (
            self.speaks_v2 and not self.lists_models and (self.cards is not None or self.refusal.status == _NOT_FOUND)
        )

    @property
    def bases(self) -> list[str]:
        """The models that it lists, without adapters of them and without further names of one."""
        listed = self.cards or ()
        names = {card.name for card in listed}
        own = [card for card in listed if card.parent in (None, card.name) or card.parent not in names]
        roots: dict[str, str] = {}
        for card in own or listed:
            roots.setdefault(card.root or card.name, card.name)
        return list(dict.fromkeys([*roots.values(), *self.decoupled]))

    @property
    def place(self) -> str:
        return f"{option_of(self.arm.label)} {self.arm.target}"

    def table(self) -> str:
        """What it said to each question, a line for each."""
        rows: list[tuple[str, str]] = []
        for (_, answer), alike in groupby(self.said, lambda row: (row[0].partition(", ")[0], row[1])):
            first, *more = [question for question, _ in alike]
            route, _, changes = first.partition(", ")
            rows.append((f"  {changes}" if changes else route, answer))
            rows += [(f"  and {len(more)} more, the last {more[-1].partition(', ')[2]}", "the same")] if more else []
        width = min(_WIDEST, max(len(question) for question, _ in rows))
        lines = [f"  {question:<{width}}  {answer}" for question, answer in rows]
        return "\n".join([f"{shown(self.arm.label)} {self.arm.target} was asked:", *lines])

    def ask_for_models(self) -> None:
        """Ask for its language models, in both protocols. Raises `DeploymentError` if TLS fails."""
        target, access = self.arm.target, self.arm.access
        completions = CompletionsEndpoint(target, timeout_s=RUNNING_READY_SECONDS, access=access)
        endpoint = Endpoint(target, timeout_s=RUNNING_READY_SECONDS, access=access)
        try:
            RemoteDeployment(target, access=access).check_tls()
        except DeploymentError as exc:
            raise DeploymentError(f"{self.place}: {exc}") from exc
        self.cards, exchange = completions.list_models()
        question = f"GET {completions.address.base_path}{completions.live_path}"
        listed = f"200 ({model_names([card.name for card in self.cards or ()]) or 'no models'})"
        self.refusal = Refusal(exchange.status, f"{question} answers {self._clean(answer_text(exchange))}")
        self.said = [(question, self._clean(answer_text(exchange)) if self.cards is None else listed)]
        if exchange.failure is not None:
            remedy = tls_remedy(completions.address, "https") or "; start it, or correct the URL"
            self.refusal = Refusal(0, f"{question}: {exchange.failure}{remedy}")
            return
        self.speaks_v2 = endpoint.live()
        names = endpoint.served_models() or () if self.speaks_v2 else ()
        self.decoupled = tuple(name for name in names[:_MOST_MODELS] if _is_decoupled(endpoint, name))
        models = f"200 ({model_names(names) or 'no models'}; {model_names(self.decoupled) or 'none'} decoupled)"
        question = f"GET {endpoint.address.base_path}{endpoint.live_path}"
        self.said.append(
            (question, models if self.speaks_v2 else self._clean(answer_text(endpoint.get(endpoint.live_path))))
        )

    def fault(self) -> DeploymentError:
        """Why it has no language model as far as it says, and what to do."""
        label, (status, words) = self.arm.label, self.refusal
        by_name = (
            f"name its model with {option_of(label, 'model')} and its protocol with {option_of(label, 'transport')}"
        )
        if self.cards is not None or self.speaks_v2:
            words = f"it serves no language model that it lists ({'; '.join(map(': '.join, self.said))})"
            remedy = f"load one, correct the URL, or {by_name}"
        else:
            remedy = self._remedy(status) or f"correct the URL, or, if it lists no models, {by_name}" * bool(status)
        return DeploymentError("; ".join(filter(None, (f"{self.place}: {words}", remedy))))

    def _remedy(self, status: int) -> str | None:
        """What to do about an answer with this status; None for one that need not be a fault."""
        option = option_of(self.arm.label, "header")
        if status in REFUSED_ACCESS:
            return access_remedy(option, given=bool(self.arm.access.header))
        if _MULTIPLE_CHOICES <= status < _BAD_REQUEST:
            return "give the URL to which it redirects"
        if status == _TOO_MANY:
            return "raise that server's limit of requests"
        return "read that server's log" if status >= _SERVER_ERROR else None

    @property
    def may_stream(self) -> bool:
        """Whether it may be a server of language models that does not list them."""
        return not self.speaks_v2 and self._remedy(self.refusal.status) is None

    def choose_model(self, preferred: str) -> tuple[str, tuple[str, ...]]:
        """Its model: the arm's, or `preferred` if it has that or no list, or the only one; and notes about the choice.
        Raises `DeploymentError`."""
        names, bases = [*(card.name for card in self.cards or ()), *self.decoupled], self.bases
        if self.arm.model is not None:
            return self.arm.model, ()
        option, is_listed = option_of(self.arm.label, "model"), preferred in names
        if not is_listed and len(bases) > 1:
            raise DeploymentError(f"{self.place} serves {model_names(names)}; choose one with {option}")
        model = preferred if is_listed or not names else bases[0]
        others = [name for name in names if name not in (model, *bases)]
        note = f"{self.arm.target} serves {model}, and as adapters or other names {model_names(others)}; "
        return model, (f"{note}compare another with {option} NAME",) if others else ()

    def try_transports(self, model: str, asked: Sequence[TokenTransport]) -> dict[TokenTransport, RequestBody]:
        """The protocols in which it takes a prompt, each tried with small requests, and what differs from the usual
        fields; of the `asked` ones and, unless the arm has its own, of those that it may have. A chat comes last, and
        only where there is no other. Raises `DeploymentError` if there is none."""
        order: list[TokenTransport] = [*asked]
        if self.cards or model not in self.decoupled:
            order += ["completions", "text"]
        if model in self.decoupled or (self.speaks_v2 and not self.cards):
            order.append("generate_stream")
        if self.cards or model not in self.decoupled:
            order.append("chat")
        if self.arm.transport is not None:
            order = [self.arm.transport]
        spoken: dict[TokenTransport, RequestBody] = {}
        refusals: list[Refusal] = []
        for transport in dict.fromkeys(order):
            if transport == "chat" and spoken and transport not in asked:
                break
            body, refusal = self.fit(transport, model)
            if refusal is None:
                spoken[transport] = body
                continue
            refusals.append(refusal)
            if refusal.status in _NO_FURTHER or (not refusal.status and not refusal.words.startswith(_BROKEN)):
                break
        if spoken:
            return spoken
        listed = [card.name for card in self.cards or ()]
        told = next((refusal for refusal in refusals if refusal.status != _NOT_FOUND), refusals[0])
        options = [option_of(self.arm.label, setting) for setting in ("model", "transport")]
        remedy = self._remedy(told.status) or f"correct the URL, or choose with {' and '.join(options)}"
        if told.status == _NOT_FOUND and not self.lists_models and self.arm.model is None:
            raise DeploymentError(f"{self.fault()}\n{self.table()}")
        if told.status in _REFUSED_FIELDS:
            remedy = f"change its requests with {option_of(self.arm.label, 'body')}"
        if listed and model not in listed:
            remedy = f"it serves {model_names(listed)}: choose one with {option_of(self.arm.label, 'model')}"
        raise DeploymentError(f"{self.place}: {model} answers no prompt ({told.words}); {remedy}\n{self.table()}")

    def fit(self, transport: TokenTransport, model: str) -> tuple[RequestBody, Refusal | None]:
        """See `fitting_body`."""
        return fitting_body(partial(self._ask, transport, model), transport, self.arm.body)

    def _ask(self, transport: TokenTransport, model: str, body: RequestBody) -> Refusal | None:
        """Send one small prompt; why it was not answered."""
        target = InferenceTarget(transport, self.arm.target, model, access=self.arm.access, body=body)
        address = Address.parse(self.arm.target, self.arm.access)
        refusal: Refusal | None = None
        form = {"completions": " (ids)", "text": " (text)"}.get(transport, "")
        question = f"POST {address.base_path}{PROMPT_FORMS[transport].path(address, model)}{form}"
        prompt = range(UNKNOWN_IDS[0], UNKNOWN_IDS[0] + SETTLING.prompt_tokens)
        try:
            answer = ask_tokens(
                target, _PLAN, prompt, SETTLING.output_tokens, timeout_s=_PROMPT_SECONDS, salt=token_hex(8),
                of_any_length=True,
            )  # fmt: skip
            if answer.output_tokens > SETTLING.output_tokens + _MOST_EXTRA:
                asked = f"{answer.output_tokens} tokens instead of {SETTLING.output_tokens}"
                refusal = Refusal(_BAD_REQUEST, f"max_tokens has no effect: the answer has {asked}")
        except AnswerError as exc:
            refusal = Refusal(exc.status, self._clean(str(exc)))
        except (AddressError, ConnectionRefused) as exc:
            refusal = Refusal(0, str(exc))
        said = (
            refusal.words.removeprefix("HTTP ")
            if refusal
            else f"200 ({answer.output_tokens} tokens{' with ids' * answer.has_ids})"
        )
        self.said.append((", ".join(filter(None, (question, body_in_words(body)))), said))
        return refusal

    def _clean(self, words: str) -> str:
        """A server's words without the values of the arm's headers, which it may repeat."""
        for secret in secrets_in(self.arm.access.header.values()):
            words = words.replace(secret, HIDDEN)
        return words


_PLAN = PromptPlan(low=UNKNOWN_IDS[0], high=UNKNOWN_IDS[1], seed=0)
_CHANGES: tuple[tuple[str, dict[str, object]], ...] = (
    ("cache_salt", {"cache_salt": None}),
    ("return_token_ids", {"return_token_ids": None}),
    ("continuous_usage_stats", {"stream_options": {"include_usage": True}}),
    ("stream_options", {"stream_options": None}),
    ("max_tokens", {"max_tokens": None, "max_completion_tokens": TOKENS_PLACE}),
    ("ignore_eos", {"ignore_eos": None}),
    ("temperature", {"temperature": None}),
)
"""What can be changed where a server refuses a field, by the field; what changes its work last."""


def fitting_body(
    ask: Callable[[RequestBody], Refusal | None], transport: TokenTransport, given: RequestBody
) -> tuple[RequestBody, Refusal | None]:
    """The fields that differ from the usual ones so that a server answers, beside those `given`; with its first
    refusal if it never does. Fields that a refusal names are changed first, then one after another; of those that it
    did not name alone each is tried again at the end."""
    fields = {*request_fields(transport, "", {}), *(("cache_salt",) if takes_salt(transport, {}) else ())}
    left = {name: change for name, change in _CHANGES if not change.keys() & given.keys() and change.keys() & fields}
    changed: dict[str, dict[str, object]] = {}
    doubted: list[str] = []

    def body(changed: Mapping[str, dict[str, object]]) -> RequestBody:
        return {**given, **{name: value for change in changed.values() for name, value in change.items()}}

    first = refusal = ask(body(changed))
    while refusal is not None:
        named = [name for name in left if _names(refusal, name)]
        is_final = not named and any(_names(refusal, name) for name in body(changed))
        if is_final or not left or refusal.status in _OTHER_FAULTS or not (named or refusal.status in _REFUSED_FIELDS):
            return given, first
        if "continuous_usage_stats" in named and "stream_options" in named:
            named.remove("stream_options")
        doubted += [] if len(named) == 1 else named or [*left][:1]
        changed |= {name: left.pop(name) for name in named or [*left][:1]}
        refusal = ask(body(changed))
    for name in doubted if len(changed) > 1 else ():
        fewer = {other: change for other, change in changed.items() if other != name}
        if body(fewer) == body(changed) or ask(body(fewer)) is None:
            changed = fewer
    return body(changed), None


def _names(refusal: Refusal, field_name: str) -> bool:
    return re.search(rf"\b{re.escape(field_name)}\b", refusal.words) is not None


def find_language_models(
    arms: Sequence[ArmRequest], preferred: str, *, certain: bool, named: bool = False,
    asked: Sequence[TokenTransport] = (), show: Callable[[str], None] | None = None,
) -> Mapping[Label, ServedTokens] | None:  # fmt: skip
    """The language model of each of these servers: the arm's, or `preferred`, or the only one, and the protocols in
    which it takes prompts, the `asked` ones first. None if they serve other models, unless it is `certain` that they
    do not. Where one of them is a server of language models, so are the others. `named`: whether the user named
    `preferred`. `show` gets a table of all questions and answers. Raises `DeploymentError` about the arm at fault."""
    servers = [AskedServer(arm) for arm in arms]
    try:
        for server in servers:
            server.ask_for_models()
        if not certain and not all(server.lists_models for server in servers):
            if any(server.lists_models for server in servers):
                if all(server.speaks_v2 for server in servers) and any(server.is_of_tensors for server in servers):
                    return None
            elif any(server.speaks_v2 for server in servers) or not any(server.refusal.status for server in servers):
                return None
        listing = [set(server.bases) for server in servers if server.lists_models and server.arm.model is None]
        common = set.intersection(*listing) if listing else set()
        if not named and preferred not in common:
            preferred = next(iter(common)) if len(common) == 1 else ""
        for server in servers:
            _require_models(server, preferred)
        served = {server.arm.label: _served(server, preferred, asked) for server in servers}
        _share_a_chat(servers, served)
        return served
    finally:
        if show is not None:
            show("\n".join(server.table() for server in servers if server.said))


def _require_models(server: AskedServer, preferred: str) -> None:
    """Wait a moment for a server that may be starting. Raises `DeploymentError` for one that is none of language models
    as far as it says, unless there is a model to try on it."""
    deadline_s = monotonic() + RUNNING_READY_SECONDS
    while not server.lists_models and server.refusal.status in _MAY_BE_STARTING:
        if monotonic() > deadline_s:
            raise server.fault()
        sleep(_POLL_SECONDS)
        server.ask_for_models()
    if not server.lists_models and server.arm.model is None and not (preferred and server.may_stream):
        raise server.fault()


def _served(server: AskedServer, preferred: str, asked: Sequence[TokenTransport]) -> ServedTokens:
    model, notes = server.choose_model(preferred)
    bodies = server.try_transports(model, asked)
    listed = [*(card.name for card in server.cards or ()), *server.decoupled]
    if listed and model not in listed:
        notes = (f"{server.arm.target} lists {model_names(listed)}, and answers prompts to {model}",)
    return ServedTokens(model, bodies, notes)


def _share_a_chat(servers: Sequence[AskedServer], served: Mapping[Label, ServedTokens]) -> None:
    """Try the chat on the other servers, too, if one has nothing else: all arms should get the same requests."""
    if not any([*tokens.bodies] == ["chat"] for tokens in served.values()):
        return
    for server in servers:
        tokens = served[server.arm.label]
        if "chat" not in tokens.bodies and server.arm.transport is None:
            body, refusal = server.fit("chat", tokens.model)
            if refusal is None:
                tokens.bodies["chat"] = body


def _is_decoupled(endpoint: Endpoint, model: str) -> bool:
    """Whether a model may answer a request several times, as one that streams tokens does."""
    with suppress(EndpointError):
        return unmeasurable(endpoint.config(model), model) is not None
    return False


def _rows(server: RemoteDeployment, arm: ArmRequest) -> tuple[IndexRow, ...] | None:
    try:
        return server.wait_live().repository_index()
    except DeploymentError as exc:
        raise DeploymentError(f"{option_of(arm.label)}: {exc}") from exc


def _notes(
    arms: Sequence[ArmRequest],
    names: Mapping[Label, str],
    named: Mapping[Label, str],
    rows: Mapping[Label, tuple[IndexRow, ...] | None],
    preferred: str,
) -> tuple[str, ...]:
    notes = []
    found = sorted(set(names.values()) - {*named.values(), preferred})
    if found:
        notes.append(f"the model is {model_names(found)}, the only one that the servers have in common")
    for arm in arms:
        versions = sorted(
            str(row.version)
            for row in rows.get(arm.label) or ()
            if row.name == names[arm.label] and row.ready and row.version is not None
        )
        if len(versions) > 1 and arm.access.version is None:
            notes.append(
                f"{arm.target} serves the versions {model_names(versions)} of {model_names([names[arm.label]])} "
                f"and chooses itself; ask for one with {option_of(arm.label, 'version')}"
            )
    return tuple(notes)


def _to_choose(arms: Sequence[ArmRequest], common: Sequence[str], listed: Mapping[Label, Sequence[str]]) -> str:
    """The servers' models, and the commands that name one."""
    command = shlex.join(["abserve", "compare", *(part for arm in arms for part in (option_of(arm.label), arm.target))])
    if any(len(arm.label) > 1 or arm.access.header for arm in arms):
        command = "abserve compare …"  # an experiment file, or values that nobody may read on a screen
    if common:
        lines = [f"the servers have {len(common)} models in common; choose one:"]
        lines += [f"  {command} --model {_quoted(name)}" for name in common[:_MOST_COMMANDS]]
        more = len(common) - _MOST_COMMANDS
        return "\n".join([*lines, *([f"  or one of {more} more: {model_names(common[_MOST_COMMANDS:])}"] * (more > 0))])
    lines = ["the servers have no model in common:"]
    lines += [f"  {shown(arm.label)} {arm.target} serves {_of(arm, listed)}" for arm in arms]
    options = " ".join(
        f"{option_of(arm.label, 'model')} {_quoted(arm.model or listed[arm.label][0])}"
        for arm in arms
        if len(arm.label) == 1
    )
    lines.append(f"if they compute the same, name one on each: {command} {options}".rstrip())
    return "\n".join(lines)


def _of(arm: ArmRequest, listed: Mapping[Label, Sequence[str]]) -> str:
    return model_names(listed.get(arm.label) or [arm.model or ""])


def _quoted(name: str) -> str:
    return shlex.quote(one_line(name))
