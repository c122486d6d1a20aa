"""The model of servers at URLs when none was named, and whether it streams tokens: by what each of them lists."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from loadgen.client.connection import AddressError, ConnectionRefused
from loadgen.client.endpoint import IndexRow, model_names, nothing_ready, ready_models
from loadgen.client.outputs import AnswerError
from loadgen.client.token_traffic import ask_tokens
from loadgen.client.transports import InferenceTarget
from loadgen.documents import one_line
from loadgen.experiment.prompts import SETTLING, UNKNOWN_IDS, PromptPlan
from loadgen.launch.deployment import DeploymentError, RemoteDeployment, RemoteLanguageDeployment
from loadgen.records.run import (
    TEXT_TRANSPORTS,
    TOKEN_TRANSPORTS,
    ArmRequest,
    Label,
    TokenTransport,
    option_of,
    shown,
)

_MOST_COMMANDS = 8


@dataclass(frozen=True, slots=True)
class FoundModels:
    """The model of each arm, by its name on that arm's server."""

    names: Mapping[Label, str]
    notes: tuple[str, ...] = ()
    """What was chosen, and what the servers choose themselves."""


def find_models(arms: Sequence[ArmRequest], preferred: str) -> FoundModels:
    """The model that all servers have in common, `preferred` if that is one; arms that name theirs are not asked.

    A server that lists no models is asked for each of the others'. Raises `DeploymentError` if the choice is the
    user's, with the commands to choose by.
    """
    named = {arm.label: arm.model for arm in arms if arm.model is not None}
    asking = [arm for arm in arms if arm.model is None]
    servers = {arm.label: RemoteDeployment(arm.target, access=arm.access) for arm in asking}
    rows = {arm.label: _rows(servers[arm.label], arm) for arm in asking}
    listed: dict[Label, Sequence[str]] = {
        label: ready_models(of_arm) for label, of_arm in rows.items() if of_arm is not None
    }
    candidates = {*[preferred], *named.values(), *(name for names in listed.values() for name in names)}
    for arm in asking:
        if rows[arm.label] is None:
            listed[arm.label] = [name for name in sorted(candidates) if servers[arm.label].has_model(name)]
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
    return FoundModels(names, _notes(arms, names, named, rows, preferred))


@dataclass(frozen=True, slots=True)
class ServedTokens:
    """The language model of a server at a URL."""

    model: str
    protocols: tuple[TokenTransport, ...]


def find_language_models(
    arms: Sequence[ArmRequest], preferred: str, *, certain: bool
) -> Mapping[Label, ServedTokens] | None:
    """The language model of each of these servers: the arm's, or `preferred`, or the only one. None if one of them
    serves no language model, unless it is `certain` that all do. Raises `DeploymentError`."""
    found = {}
    for arm in arms:
        listed = RemoteLanguageDeployment(arm.target, access=arm.access).models_by_protocol()
        if not listed:
            if not certain:
                return None
            raise DeploymentError(
                f"{option_of(arm.label)} {arm.target} serves no language model: it lists none at /v1/models (OpenAI's "
                "API) and has no decoupled one (Triton's generate_stream); start it, or correct the URL"
            )
        names = list(dict.fromkeys(name for those in listed.values() for name in those))
        model = next((name for name in (arm.model, preferred) if name in names), None)
        if model is None and (arm.model is not None or len(names) > 1):
            raise DeploymentError(
                f"{option_of(arm.label)} {arm.target} serves {model_names(names)}, not {arm.model or preferred}; "
                f"choose one with {option_of(arm.label, 'model')}"
            )
        model = model or names[0]
        protocols = [protocol for protocol, those in listed.items() if model in those]
        if "completions" in protocols:
            protocols.remove("completions")
            protocols = [*_of_openai(arm, model, certain=not protocols), *protocols]
        found[arm.label] = ServedTokens(model, tuple(sorted(protocols, key=TOKEN_TRANSPORTS.index)))
    return found


def _of_openai(arm: ArmRequest, model: str, *, certain: bool) -> list[TokenTransport]:
    """The forms in which a server that lists its models as OpenAI's does takes a prompt: each is tried with a small
    request, the chat only if there is no other. Raises `DeploymentError` if there is none, unless it is not `certain`
    that it must have one."""
    spoken: list[TokenTransport] = []
    refusals: list[str] = []
    prompt = range(UNKNOWN_IDS[0], UNKNOWN_IDS[0] + SETTLING.prompt_tokens)
    plan = PromptPlan(low=UNKNOWN_IDS[0], high=UNKNOWN_IDS[1], seed=0)
    for transport in ("completions", *TEXT_TRANSPORTS):
        if transport == "chat" and spoken:
            break
        target = InferenceTarget(transport, arm.target, model, access=arm.access)
        try:
            ask_tokens(target, plan, prompt, SETTLING.output_tokens, of_any_length=True)
        except (AddressError, AnswerError, ConnectionRefused) as exc:
            refusals.append(f"{transport}: {exc}")
        else:
            spoken.append(transport)
    if not spoken and certain:
        raise DeploymentError(
            f"{option_of(arm.label)} {arm.target} lists {model} at /v1/models and answers no prompt to it "
            f"({'; '.join(refusals)}); let it stream /v1/completions or /v1/chat/completions"
        )
    return spoken


def _rows(server: RemoteDeployment, arm: ArmRequest) -> tuple[IndexRow, ...] | None:
    try:
        return server.listed_models()
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
                f"{shown(arm.label)} serves the versions {model_names(versions)} of {model_names([names[arm.label]])} "
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
