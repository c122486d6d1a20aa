"""The gRPC front end: HTTP/2, calls, and the methods of tensors and of language models."""
