"""Prints servers/models/catalogue.json: what is known of the known models without their libraries."""

import sys

import msgspec

from servers.models.descriptions import Catalogue, Known, versions
from servers.models.registry import describe, known_references

if __name__ == "__main__":
    models = {reference: Known.of(describe(reference), measured=True) for reference in known_references()}
    document = msgspec.json.encode(Catalogue(versions=versions(), models=models)).decode()
    for reference in models:  # a line for each
        document = document.replace(f'"{reference}":', f'\n"{reference}":', 1)
    sys.stdout.write(f"{document}\n")
