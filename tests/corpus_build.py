"""Makes the sample photographs again: `python tests/corpus_build.py`. It alone needs scikit-image and matplotlib.

Only pictures that their package, or the page that it names, declares public domain or CC0 are used. Another version of
libjpeg may write other bytes; the checked-in files are the corpus.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from servers.models.items import CORPUS


@dataclass(frozen=True, slots=True)
class Original:
    """A picture that ships in a wheel, and what that package says about its rights."""

    package: str
    path: str
    subject: str
    author: str
    licence: str
    source: str


@dataclass(frozen=True, slots=True)
class Variant:
    """One file of the corpus: `box` crops the original, `size` then scales it (width, height)."""

    original: str
    quality: int
    box: tuple[int, int, int, int] | None = None
    size: tuple[int, int] | None = None
    subsampling: str = "4:2:0"
    progressive: bool = False
    note: str = ""


SKIMAGE, MATPLOTLIB = "scikit-image", "matplotlib"
_CC0 = "CC0, by its author (docstring of `skimage.data.{}`)"
_PD = "public domain (docstring of `skimage.data.{}`)"
ORIGINALS = {
    "astronaut": Original(
        SKIMAGE,
        "skimage/data/astronaut.png",
        "Eileen Collins",
        "NASA",
        _PD.format("astronaut"),
        "https://flic.kr/p/r9qvLn",
    ),
    "chelsea": Original(
        SKIMAGE,
        "skimage/data/chelsea.png",
        "the cat Chelsea",
        "Stefan van der Walt",
        _CC0.format("chelsea"),
        "given by its author",
    ),
    "coffee": Original(
        SKIMAGE,
        "skimage/data/coffee.png",
        "a cup of coffee",
        "Rachel Michetti",
        _CC0.format("coffee"),
        "given by its author",
    ),
    "rocket": Original(
        SKIMAGE,
        "skimage/data/rocket.jpg",
        "launch of DSCOVR on a Falcon 9",
        "SpaceX",
        _PD.format("rocket"),
        "https://www.flickr.com/photos/spacexphotos/16511594820/",
    ),
    "hubble": Original(
        SKIMAGE,
        "skimage/data/hubble_deep_field.jpg",
        "Hubble eXtreme Deep Field",
        "NASA (Hubble)",
        _PD.format("hubble_deep_field"),
        "http://hubblesite.org/newscenter/archive/releases/2012/37/image/a/",
    ),
    "retina": Original(
        SKIMAGE,
        "skimage/data/retina.jpg",
        "fundus of a human eye",
        "Mikael Häggström",
        "CC0 1.0 (docstring of `skimage.data.retina`)",
        "https://commons.wikimedia.org/wiki/File:Fundus_photograph_of_normal_left_eye.jpg",
    ),
    "hopper": Original(
        MATPLOTLIB,
        "matplotlib/mpl-data/sample_data/grace_hopper.jpg",
        "Grace Hopper",
        "James S. Davis, United States Navy",
        "public domain, a work of the United States federal government (page named in the file's JPEG comment)",
        "https://commons.wikimedia.org/wiki/File:Grace_Hopper.jpg",
    ),
    "camera": Original(
        SKIMAGE,
        "skimage/data/camera.png",
        "a man with a camera",
        "Lav Varshney",
        _CC0.format("camera"),
        "given by its author",
    ),
    "clock": Original(
        SKIMAGE,
        "skimage/data/clock_motion.png",
        "a wall clock, motion-blurred",
        "Stefan van der Walt",
        _PD.format("clock"),
        "given by its author",
    ),
    "grass": Original(
        SKIMAGE,
        "skimage/data/grass.png",
        "grass",
        "Linolafett",
        _CC0.format("grass"),
        "https://www.deviantart.com/linolafett/art/Grass-01-434853879",
    ),
    "gravel": Original(
        SKIMAGE,
        "skimage/data/gravel.png",
        "gravel",
        "CC0Textures",
        _CC0.format("gravel"),
        "https://cc0textures.com/view.php?tex=Gravel04",
    ),
}
VARIANTS = (
    Variant("astronaut", 90),
    Variant("chelsea", 95, subsampling="4:4:4"),
    Variant("coffee", 85),
    Variant("rocket", 80),
    Variant("hopper", 92),
    Variant("hubble", 85),
    Variant("retina", 90, progressive=True, note="progressive"),
    Variant("camera", 85, note="greyscale"),
    Variant("astronaut", 75, box=(110, 0, 334, 224), note="cropped"),
    Variant("coffee", 60, box=(150, 50, 450, 400), note="cropped"),
    Variant("chelsea", 70, box=(120, 20, 320, 260), size=(320, 384), note="cropped and enlarged"),
    Variant("rocket", 65, box=(220, 0, 420, 427), size=(240, 512), note="cropped and enlarged"),
    Variant("astronaut", 80, box=(20, 250, 320, 490), size=(2000, 1600), note="cropped and enlarged"),
    Variant("retina", 75, box=(750, 450, 1250, 950), size=(256, 256), subsampling="4:4:4", note="cropped and reduced"),
    Variant("hopper", 70, box=(136, 60, 376, 380), note="cropped"),
    Variant("clock", 75, note="greyscale"),
    Variant("grass", 70, note="greyscale"),
    Variant("gravel", 65, note="greyscale"),
)


def build(folder: Path) -> list[str]:
    """Write every file and CREDITS.md into `folder`; returns the names."""
    rows, names = [], []
    for index, variant in enumerate(VARIANTS):
        original = ORIGINALS[variant.original]
        with Image.open(_wheel_file(original.path)) as opened:
            image = opened.convert("L" if opened.mode == "L" else "RGB")
        if variant.box:
            image = image.crop(variant.box)
        if variant.size:
            image = image.resize(variant.size, Image.Resampling.LANCZOS)
        name = f"{index:02d}-{variant.original}-{image.width}x{image.height}-q{variant.quality}.jpg"
        options: dict[str, Any] = {} if image.mode == "L" else {"subsampling": variant.subsampling}
        image.save(
            folder / name, "JPEG", quality=variant.quality, progressive=variant.progressive, optimize=True, **options
        )
        names.append(name)
        change = f"JPEG quality {variant.quality}" + (f", {variant.note}" if variant.note else "")
        source = f"{original.source}; in the wheel of {original.package}"
        rows.append(f"| {name} | {original.subject} | {original.author} | {original.licence} | {source} | {change} |")
    (folder / "CREDITS.md").write_text(_credits(rows), encoding="utf-8")
    return names


def _credits(rows: list[str]) -> str:
    head = (
        "# Credits of the sample photographs\n\n"
        "Every picture is in the public domain or under CC0, and ships in the wheel of scikit-image or matplotlib.\n"
        "`tests/corpus_build.py` of the project made these files and this page from those wheels.\n\n"
        "| File | Subject | Author | Licence | Source | Made as |\n|---|---|---|---|---|---|\n"
    )
    return head + "\n".join(rows) + "\n"


def _wheel_file(path: str) -> Path:
    package, _, rest = path.partition("/")
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        raise SystemExit(f"{package} is not installed; run: pip install scikit-image matplotlib")
    return Path(found.origin).parent / rest


if __name__ == "__main__":
    build(CORPUS)
