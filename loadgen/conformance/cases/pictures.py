"""Cases 25 to 27: encoded images that lie about their size, are huge, broken, or of another kind."""

from __future__ import annotations

from typing import Any

import numpy as np

from loadgen.conformance.case import Case, Probe, Section
from loadgen.conformance.images import claiming_jpeg, flat_jpeg, flat_png
from loadgen.conformance.records import MIB, Answer, Door, MemoryBound, NotApplicableError, Observation, expect
from loadgen.conformance.settings import WITH_IMAGES
from loadgen.conformance.subject import Subject

CLAIMED_PIXELS, CLAIMING_BYTES = 65_500, 692
HUGE_WIDTH, HUGE_HEIGHT = 10_000, 8_000
PICTURE = flat_jpeg(224, 224)


def _ask(subject: Subject, image: bytes) -> Answer:
    model = subject.image_model
    if model is None:
        raise NotApplicableError("no model takes an encoded image; name one with --image-model")
    array = np.empty(model.shape(model.inputs[0], 1), object)
    array.fill(image)
    request = model.request(arrays=[array])
    return subject.infer(request.body(), path=request.path, deadline_s=60.0)


def images(*pictures: bytes) -> Probe:
    """Each as one request."""
    return lambda subject, _: Observation(tuple(_ask(subject, picture) for picture in pictures))


def _huge(subject: Subject, _: Door) -> Observation:
    return Observation((_ask(subject, flat_jpeg(HUGE_WIDTH, HUGE_HEIGHT)),))


def _flipped(position: int) -> bytes:
    """Bits turned over in the coded blocks: some decoders notice, and must then refuse."""
    data = bytearray(PICTURE)
    data[-position] ^= 0x55
    return bytes(data)


BAD, DOCUMENTED = expect("400"), expect("200", "400", note="a documented result")
TOO_LARGE = expect("400", note="over the pixel limit")
CLAIMING = claiming_jpeg(CLAIMED_PIXELS, CLAIMED_PIXELS, CLAIMING_BYTES)
TRUNCATED = (larger := flat_jpeg(448, 448))[: len(larger) * 4 // 5]
FLIPPED = images(*(_flipped(position) for position in (10, 30, 60)))
HERE: dict[str, Any] = {"setting": WITH_IMAGES}
LYING = HERE | {"memory": MemoryBound(peak_bytes=16 * MIB), "destructive": True}

# fmt: off
CASES = (
    Case("25", f"JPEG header claiming {CLAIMED_PIXELS}×{CLAIMED_PIXELS} in {CLAIMING_BYTES} bytes",
         images(CLAIMING), BAD, warm_up=lambda subject: _ask(subject, PICTURE), **LYING),
    Case("26", f"honest JPEG of {HUGE_WIDTH * HUGE_HEIGHT // 1_000_000} megapixels", _huge, TOO_LARGE,
         destructive=True, **HERE),
    Case("27a", "JPEG truncated at 80 %", images(TRUNCATED), BAD, **HERE),
    Case("27b", "JPEG with flipped bits", FLIPPED, DOCUMENTED, **HERE),
    Case("27c", "no image at all; empty", images(b"not a picture", b""), BAD, **HERE),
    Case("27d", "a PNG named .jpg", images(flat_png(64, 64)), DOCUMENTED, **HERE),
    Case("27e", "CMYK JPEG", images(flat_jpeg(224, 224, 4)), DOCUMENTED, **HERE),
    Case("27f", "grey JPEG", images(flat_jpeg(224, 224, 1)), expect("200"), **HERE),
)
# fmt: on

SECTIONS = (Section("Pictures", "A decoder limits what it decodes before it takes memory for it.", CASES),)
