"""What a front end does whatever the protocol: checks, decodes, makes requests and passes them to the engine."""
