import sys

# Triton puts the folder in which it was started first, and a folder servers there would be imported instead.
sys.path.sort(key=lambda path: not path)
# abserve must be installed beside Triton, since the code is in servers.triton.python_backend.
from abserve.packages import FOLDER

sys.path.insert(0, FOLDER)
from servers.triton.python_backend import DecodingModel

TritonPythonModel = DecodingModel
