# abserve must be installed beside Triton, since the code is in servers.triton.python_backend.
from servers.triton.python_backend import DecodingModel

TritonPythonModel = DecodingModel
