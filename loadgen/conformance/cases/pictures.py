"""Cases 25 to 27: encoded images that lie about their size, are huge, broken, or of another kind."""

from __future__ import annotations

import numpy as np

from loadgen.conformance.case import Case, Probe
from loadgen.conformance.images import claiming_jpeg, flat_jpeg, flat_png
from loadgen.conformance.model import Body, Model
from loadgen.conformance.probes import BAD
from loadgen.conformance.records import MIB, Answer, Expectation, MemoryBound, NotApplicableError, Observation
from loadgen.conformance.settings import WITH_IMAGES
from loadgen.conformance.subject import Subject

CLAIMED_PIXELS, CLAIMING_BYTES = 65_500, 692
HUGE_WIDTH, HUGE_HEIGHT = 10_000, 8_000


def is_image_model(model: Model) -> bool:
    """Whether it takes one encoded image: a single BYTES input with one element an item."""
    if len(model.inputs) != 1 or model.inputs[0].datatype != "BYTES":
        return False
    shape = model.shape(model.inputs[0], 1)
    return int(np.prod(shape)) == 1


def _model(subject: Subject) -> Model:
    if subject.image_model is None:
        raise NotApplicableError("no model takes an encoded image; name one with --image-model")
    return subject.image_model


def _body(model: Model, image: bytes) -> Body:
    array = np.empty(model.shape(model.inputs[0], 1), object)
    array[...] = image
    return model.binary_of([array], 1)


def _ask(subject: Subject, image: bytes) -> Answer:
    model = _model(subject)
    return subject.infer(_body(model, image), model=model, deadline_s=60.0)


def _images(*images: bytes) -> Probe:
    return lambda subject: Observation(tuple(_ask(subject, image) for image in images))


def _huge(subject: Subject) -> Observation:
    _model(subject)
    return Observation((_ask(subject, flat_jpeg(HUGE_WIDTH, HUGE_HEIGHT)),))


def _warm(subject: Subject) -> None:
    _ask(subject, flat_jpeg(224, 224))


def _flipped() -> tuple[bytes, ...]:
    """Bits turned over in the coded blocks: some decoders notice, and must then refuse."""
    whole = flat_jpeg(224, 224)
    flipped = []
    for position in (10, 30, 60):
        data = bytearray(whole)
        data[-position] ^= 0x55
        flipped.append(bytes(data))
    return tuple(flipped)


_DOCUMENTED = Expectation(statuses=("200", "400"), note="a documented result")

CASES = (
    Case(
        number="25",
        setting=WITH_IMAGES,
        title=f"JPEG header claiming {CLAIMED_PIXELS}×{CLAIMED_PIXELS} in {CLAIMING_BYTES} bytes",
        probe=_images(claiming_jpeg(CLAIMED_PIXELS, CLAIMED_PIXELS, CLAIMING_BYTES)),
        warm_up=_warm,
        expected=BAD,
        memory=MemoryBound(peak_bytes=16 * MIB),
        destructive=True,
    ),
    Case(
        number="26",
        setting=WITH_IMAGES,
        title=f"honest JPEG of {HUGE_WIDTH * HUGE_HEIGHT // 1_000_000} megapixels",
        probe=_huge,
        expected=Expectation(statuses=("400",), note="over the pixel limit"),
        destructive=True,
    ),
    Case(
        number="27a",
        setting=WITH_IMAGES,
        title="JPEG truncated at 80 %",
        probe=lambda subject: _images((whole := flat_jpeg(448, 448))[: len(whole) * 4 // 5])(subject),
        expected=BAD,
    ),
    Case(
        number="27b",
        setting=WITH_IMAGES,
        title="JPEG with flipped bits",
        probe=_images(*_flipped()),
        expected=_DOCUMENTED,
    ),
    Case(
        number="27c",
        setting=WITH_IMAGES,
        title="no image at all; empty",
        probe=_images(b"not a picture", b""),
        expected=BAD,
    ),
    Case(
        number="27d",
        setting=WITH_IMAGES,
        title="a PNG named .jpg",
        probe=_images(flat_png(64, 64)),
        expected=_DOCUMENTED,
    ),
    Case(
        number="27e",
        setting=WITH_IMAGES,
        title="CMYK JPEG",
        probe=_images(flat_jpeg(224, 224, 4)),
        expected=_DOCUMENTED,
    ),
    Case(
        number="27f",
        setting=WITH_IMAGES,
        title="grey JPEG",
        probe=_images(flat_jpeg(224, 224, 1)),
        expected=Expectation(statuses=("200",)),
    ),
)
