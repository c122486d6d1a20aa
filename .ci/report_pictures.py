"""Photographs chapters of a report with Chromium: `python .ci/report_pictures.py RUN FOLDER`.

The report is made again from the stored result of a published run, with today's headline.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image
from terminal_picture import with_todays_words

from loadgen.report.contents import result_document
from loadgen.report.renderers.html import render_html

PICTURES = {"report": ("", 0, 1090), "report-details": ("comparisons", 1200, 1190)}
"""Each picture, the id of a heading (none: the page's top), pixels above it, and its height."""
WIDTH = 1400


def photograph(report: str, heading: str, above: int, height: int, picture: Path) -> None:
    """Store the part of a report around a heading as a PNG file with a palette."""
    move = f"document.body.style.marginTop = ({above} - document.getElementById('{heading}').offsetTop) + 'px'"
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "page.html")
        page.write_text(report + (f"<script>{move}</script>" if heading else ""))
        command = ["chromium", "--headless", "--no-sandbox", "--hide-scrollbars", f"--user-data-dir={folder}/profile"]
        command += ["--virtual-time-budget=20000"]  # so that the charts are drawn
        command += [f"--window-size={WIDTH},{height}", f"--screenshot={picture}", page.as_uri()]
        subprocess.run(command, check=True, timeout=120, stderr=subprocess.DEVNULL)
    colours = Image.open(picture).convert("RGB")
    colours.quantize(64, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    text = render_html(result_document(with_todays_words(Path(sys.argv[1]))))
    for name, (heading, above, height) in PICTURES.items():
        photograph(text, heading, above, height, Path(sys.argv[2], f"{name}.png").resolve())
