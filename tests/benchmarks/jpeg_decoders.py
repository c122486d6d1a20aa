"""How long an image takes from its JPEG file to the model's pixels: as the front ends do it, and on a GPU.

    python -m tests.benchmarks.jpeg_decoders

The front ends' way is simplejpeg and Pillow on one core. The other one is nvJPEG and an antialiased resize on the GPU
through torchvision, in batches. The last columns say by how much the pixels differ, in levels of 256.
"""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from servers.models.images import decode_jpeg, resize_and_crop
from servers.models.registry import get_variant
from servers.models.specification import Preprocessing
from servers.protocol.tensors import Array

SIZES = ((256, 256), (500, 375), (640, 480), (1280, 960), (1920, 1080), (4000, 3000))
BATCHES = (1, 8, 64)


def picture(width: int, height: int) -> bytes:
    """A JPEG file of soft noise."""
    noise = np.random.default_rng(0).integers(0, 256, (height // 8, width // 8, 3), np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).save(content, "JPEG", quality=85)
    return content.getvalue()


def seconds(run: Callable[[], object], repeats: int) -> float:
    run()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - started) / repeats


def on_gpu(files: list[torch.Tensor], width: int, height: int, size: int) -> torch.Tensor:
    """Resized, (n, 3, height, width), but not cut."""
    from torchvision.io import ImageReadMode
    from torchvision.io import decode_jpeg as decode
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2.functional import resize

    images = torch.stack(decode(files, mode=ImageReadMode.RGB, device="cuda"))
    short = min(width, height)
    wanted = [size * height // short, size * width // short]
    resized: torch.Tensor = resize(images, wanted, interpolation=InterpolationMode.BICUBIC, antialias=True)
    torch.cuda.synchronize()
    return resized


def difference(resized: torch.Tensor, ours: Array, size: int) -> Array:
    top, left = (round((side - size) / 2) for side in resized.shape[-2:])
    theirs = resized[0, :, top : top + size, left : left + size].permute(1, 2, 0).cpu().numpy()
    return np.abs(theirs.astype(int) - ours.astype(int))


def main() -> int:
    preprocessing = get_variant("openclip_vit_b32", "jpeg").preprocessing
    assert isinstance(preprocessing, Preprocessing)
    heads = ["Image", "KiB", "front end, ms", *(f"GPU, batch {count}, ms each" for count in BATCHES), "mean", "largest"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for width, height in SIZES:
        file = picture(width, height)
        cells = [f"{width} × {height}", f"{len(file) / 1024:.0f}"]
        cells.append(f"{seconds(lambda: resize_and_crop(decode_jpeg(file), preprocessing), 8) * 1e3:.2f}")  # noqa: B023
        for count in BATCHES:
            files = [torch.frombuffer(bytearray(file), dtype=torch.uint8) for _ in range(count)]
            took = seconds(lambda: on_gpu(files, width, height, preprocessing.size), 8)  # noqa: B023
            cells.append(f"{took / count * 1e3:.2f}")
        ours = resize_and_crop(decode_jpeg(file), preprocessing)
        levels = difference(on_gpu(files[:1], width, height, preprocessing.size), ours, preprocessing.size)
        lines.append("| " + " | ".join([*cells, f"{levels.mean():.2f}", f"{levels.max()}"]) + " |")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
