"""The first step of an ensemble whose second step is a native backend of Triton: JPEG files in, UINT8 pixels out.

Runs inside Triton's python backend, the only place with `triton_python_backend_utils`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import triton_python_backend_utils as pb_utils

from servers.export.triton_config import REFERENCE
from servers.models.file_names import for_python
from servers.models.image_decoder import ImageDecoder
from servers.models.preprocessing import ImageError
from servers.models.registry import get_variant
from servers.triton.backend_tensors import array_of, repair_bytes, tensor_of
from servers.triton.engine_parameters import decoding_from_parameters


class TritonPythonModel:
    """Triton creates one per instance and calls its methods from one thread."""

    def initialize(self, args: Mapping[str, str]) -> None:
        """Read the model and the decoding settings from the config."""
        repair_bytes()
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        private = Path(for_python(args["model_repository"])) / args["model_version"] / REFERENCE
        reference = private.read_text(encoding="utf-8") if private.is_file() else parameters["model"]
        specification = get_variant(for_python(reference), "jpeg")
        self._files = specification.inputs[0].name
        self._pixels = specification.executed.inputs[0].name
        self._decoder = ImageDecoder(specification.preprocessing, decoding_from_parameters(parameters))

    def execute(self, requests: list[Any]) -> list[Any]:
        """One response per request. Decodes all images in parallel; a bad image fails only its own request."""
        begun = [
            self._decoder.start(array_of(pb_utils.get_input_tensor_by_name(request, self._files)))
            for request in requests
        ]
        answers = []
        for decoding in begun:
            try:
                answers.append(pb_utils.InferenceResponse([tensor_of(self._pixels, decoding.result())]))
            except ImageError as exc:
                error = pb_utils.TritonError(str(exc), pb_utils.TritonError.INVALID_ARG)
                answers.append(pb_utils.InferenceResponse(error=error))
        return answers

    def finalize(self) -> None:
        """Stop the threads."""
        self._decoder.close()
