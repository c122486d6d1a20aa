"""The section of a shadow: what was copied and compared, and what copies of traffic cannot say."""

from __future__ import annotations

import loadgen.report.document as doc
from loadgen.base.quantities import number, sentence, share
from loadgen.findings.shadow import FOR_CLIENTS, ShadowFound
from loadgen.verdict.result import Result


def shadow(result: Result) -> doc.Section | None:
    """What became of the chosen requests, and the limits of the comparison."""
    record = result.of(ShadowFound).record
    if record is None:
        return None
    rows = [
        ("requests to models", f"{record.requests:,}"),
        ("share of the requests that was chosen", share(record.share)),
        ("copied", f"{record.copied:,}"),
        ("dropped, because the candidate or the recorder was too slow", f"{record.dropped:,}"),
        ("without a whole answer of the primary", f"{record.unpaired:,}"),
        ("without a whole answer to the copy", f"{record.failed:,}"),
        ("refused by both with a status of 4xx, and not timed", f"{record.refused:,}"),
        ("pairs whose answers were compared", f"{record.compared:,} of {record.pairs:,}"),
        ("pairs with different answers", f"{record.wrong:,}"),
    ]
    if record.drawn:
        rows.append(("pairs of texts whose tokens were drawn, so they may differ", f"{record.drawn:,}"))
    if record.lag_p50_ms is not None and record.lag_p99_ms is not None:
        lag = f"{number(record.lag_p50_ms)} ms (p50), {number(record.lag_p99_ms)} ms (p99)"
        rows.append(("the copy was sent later by", lag))
    base, other = result.names.values()
    if record.swap:
        limits = [
            f"{sentence(FOR_CLIENTS)} The first tenth of each block is not counted.",
            f"The times are those that clients saw, of different requests to {base} and {other}, so they include how "
            "clients react to each, and the traffic must be alike from block to block.",
            "Copies go to the server whose turn it is not, to compare its answers, so its caches know these requests.",
        ]
    else:
        limits = [
            f"Clients waited for {base} alone. A slow {other} does not slow their next requests down, as it would in "
            "production.",
            f"The copy is sent after the request. A cache that both servers share favours {other}, a processor that "
            f"both share favours {base}.",
        ]
    limits.append(
        "Every copied request is executed twice. Where requests change something that both servers share, such as a "
        "database, the second one finds it changed."
    )
    return doc.section(
        "Shadow",
        doc.Table((*doc.texts("requests"), *doc.numbers("")), rows),
        doc.Items([doc.Item(text) for text in limits]),
    )


SECTIONS = {"": (shadow,)}
