"""The former name of `expected_outputs`, for importers that still use it."""

from loadgen.transport.expected_outputs import ExpectedOutputs

Promise = ExpectedOutputs
