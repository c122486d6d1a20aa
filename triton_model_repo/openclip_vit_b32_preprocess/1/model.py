# servers.triton.preprocess_model decodes the images, so this package must be installed beside Triton.
from servers.triton.preprocess_model import TritonPythonModel as TritonPythonModel
