# What decodes is servers.triton.preprocess_model, so this package must be installed beside Triton.
from servers.triton.preprocess_model import TritonPythonModel as TritonPythonModel
