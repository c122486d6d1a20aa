"""The two messages of the Open Inference Protocol that the load generator sends and reads over gRPC.

tritonclient has them too, but its package imports grpcio, which weighs 20 MB and which nothing here uses. Fields that
are not read are left out, as the parameters of answers: protobuf skips what it does not know.
"""

from __future__ import annotations

from typing import Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_PACKAGE = "inference"
_FIELDS = {
    "InferTensorContents": (
        "1 bool* bool_contents", "2 int32* int_contents", "3 int64* int64_contents", "4 uint32* uint_contents",
        "5 uint64* uint64_contents", "6 float* fp32_contents", "7 double* fp64_contents", "8 bytes* bytes_contents",
    ),
    "InferTensor": ("1 string name", "2 string datatype", "3 int64* shape", "5 InferTensorContents contents"),
    "Parameter": ("2 int64 int64_param", "5 uint64 uint64_param"),
    "NamedParameter": ("1 string key", "2 Parameter value"),
    "ModelInferRequest": (
        "1 string model_name", "2 string model_version", "3 string id", "4 NamedParameter* parameters",
        "5 InferTensor* inputs",
        "6 InferTensor* outputs", "7 bytes* raw_input_contents",
    ),
    "ModelInferResponse": (
        "1 string model_name", "2 string model_version", "3 string id", "5 InferTensor* outputs",
        "6 bytes* raw_output_contents",
    ),
}  # fmt: skip
"""Number, type and name of each field; a star is `repeated`."""


def _messages() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="inference.proto", package=_PACKAGE, syntax="proto3")
    types = descriptor_pb2.FieldDescriptorProto.Type
    for title, fields in _FIELDS.items():
        message = file.message_type.add(name=title)
        for number, kind, name in map(str.split, fields):
            plain, label = kind.removesuffix("*"), 3 if kind.endswith("*") else 1
            field = message.field.add(name=name, number=int(number), label=label)
            if plain in _FIELDS:
                field.type, field.type_name = types.Value("TYPE_MESSAGE"), f".{_PACKAGE}.{plain}"
            else:
                field.type = types.Value(f"TYPE_{plain.upper()}")
    pool = descriptor_pool.DescriptorPool()  # not the common one, where tritonclient's have the same names
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"{_PACKAGE}.{name}")) for name in _FIELDS}


_CLASSES = _messages()
ModelInferRequest: Any = _CLASSES["ModelInferRequest"]
ModelInferResponse: Any = _CLASSES["ModelInferResponse"]
