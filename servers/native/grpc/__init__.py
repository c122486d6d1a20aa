"""The gRPC front end: HTTP/2, calls, and the methods of tensors and of language models."""

from servers.options.libraries import import_library

import_library("tritonclient.grpc")
