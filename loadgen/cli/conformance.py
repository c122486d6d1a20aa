"""`abserve conformance`: parse the options, run the cases, print the table."""

from __future__ import annotations

from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loadgen.cli.output import announce, check_files, console_for, fail, print_report, write_json
from loadgen.records.payloads import DEFAULT_NAME
from loadgen.records.targets import Kind

if TYPE_CHECKING:
    from loadgen.conformance.servers import Session

HELP_GROUP = "Explore"

EXIT_CONFORMS, EXIT_DEVIATES = 0, 1


def conformance(
    url: Annotated[str | None, typer.Argument(help="The HTTP URL of an Open Inference Protocol server.")] = None,
    grpc: Annotated[str | None, typer.Option(help="The HOST:PORT of its gRPC endpoint.")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            envvar="ABSERVE_CONFORMANCE_MODEL",
            help="The model to test; default: the server's only one, with --launch openclip_vit_b32.",
        ),
    ] = None,
    image_model: Annotated[
        str | None, typer.Option(help="A model that takes an encoded image; default: the first one found.")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE", help="Write the report as JSON; - means standard output.")
    ] = None,
    only: Annotated[str | None, typer.Option(help="Cases, such as 1,2b,25; a number includes all letters.")] = None,
    launch: Annotated[
        str | None, typer.Option(help="native or triton: start servers of that kind with the options each case needs.")
    ] = None,
    launch_option: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="For `abserve serve`; repeatable.")
    ] = None,
    logs: Annotated[Path | None, typer.Option(help="Folder for the logs of launched servers.")] = None,
    pid: Annotated[int | None, typer.Option(help="The server's process id, to read its memory.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Its Prometheus metrics; default: URL/metrics.")] = None,
    max_body_bytes: Annotated[int | None, typer.Option(help="The server's body limit, for case 7.")] = None,
    fuzz: Annotated[int, typer.Option(min=0, help="Run case 16 with N raw requests.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of the raw requests.")] = 0,
    growth: Annotated[bool, typer.Option("--growth", help="Run case 35: over three minutes of load.")] = False,
    markdown_file: Annotated[
        Path | None, typer.Option("--markdown", metavar="FILE", help="Write the report as Markdown.")
    ] = None,
    i_own_this_server: Annotated[
        bool, typer.Option("--i-own-this-server", help="Also run cases that may crash a server on another machine.")
    ] = False,
) -> None:
    """Send invalid input, overload and faults to a server, and report every answer that breaks the protocol."""
    errors = console_for(errors=True)
    if (url is None) == (launch is None):
        fail("give either a URL or --launch native|triton")
    if launch not in (None, "native", "triton"):
        fail(f"--launch {launch} is unknown; give native or triton")
    check_files({"--json": json_file, "--markdown": markdown_file})
    announce("preparing the cases")
    # After the argument checks, because importing grpc takes half a second.
    from loadgen.conformance.cases import select
    from loadgen.conformance.cases.long_runs import fuzz_case, growth_case
    from loadgen.conformance.records import ConformanceReport, SkippedError
    from loadgen.conformance.runner import CaseRun, report_document
    from loadgen.conformance.servers import DEFAULTS, LaunchedSession, RemoteSession, SubjectError, is_loopback
    from loadgen.launch.work_folder import work_folder
    from loadgen.measure.interruption import interruptible
    from loadgen.report.renderers.markdown import render_markdown

    try:
        select(only, language_model=None)
    except ValueError as exc:
        fail(str(exc))
    with interruptible(), work_folder("conformance") as temporary:
        session: Session
        try:
            if launch is not None:
                options = _options(launch_option or [])
                errors.print(f"starting serve {launch}", soft_wrap=True)
                session = LaunchedSession(
                    launch, model or DEFAULT_NAME, options, logs or temporary, image_model=image_model
                )
            else:
                assert url is not None
                session = RemoteSession(
                    url if "://" in url else f"http://{url}",
                    model,
                    grpc=grpc,
                    pid=pid,
                    metrics_url=metrics,
                    image_model=image_model,
                    max_body_bytes=max_body_bytes,
                )
        except (SubjectError, SkippedError) as exc:
            fail(str(exc))
        try:
            generates = session.subject(DEFAULTS).model.kind is Kind.TOKENS
            try:
                cases = list(select(only, language_model=generates))
            except ValueError as exc:
                fail(str(exc))
            if not generates:
                cases += [*([fuzz_case(fuzz, seed)] if fuzz else []), *([growth_case()] if growth else [])]
            run = CaseRun(session, destructive=launch is not None or i_own_this_server or is_loopback(url or ""))
            results = run.run(
                cases, announce=lambda case: errors.print(f"{case.number:>5} {case.title}", soft_wrap=True, style="dim")
            )
        finally:
            session.close()
    report = ConformanceReport(
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        abserve_version=version("abserve"),
        server=launch or url or "",
        server_title=session.title,
        model=session.model,
        results=results,
        stopped=run.stopped,
    )
    document = report_document(report)
    print_report(document, json_file)
    write_json(report, json_file)
    if markdown_file is not None:
        try:
            markdown_file.write_text(render_markdown(document), encoding="utf-8")
        except OSError as exc:
            fail(f"--markdown {markdown_file} cannot be written: {exc.strerror or exc}")
    raise typer.Exit(EXIT_DEVIATES if report.failed else EXIT_CONFORMS)


def _options(items: list[str]) -> dict[str, str]:
    options = {}
    for item in items:
        name, separator, value = item.partition("=")
        if not name:
            fail(f"--launch-option {item} has no name; give NAME=VALUE")
        options[name.removeprefix("--")] = value if separator else "true"
    return options
