"""The HTTP front end: connections, the parser, and the routes of tensors, of language models and of documents."""
