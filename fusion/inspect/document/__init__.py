"""Builds the document of a report: its data as JSON, in the structure of `structure.py`, which the page shows.

build.py      reports → the document
edges.py      operations ↔ steps, refusals → steps
files.py      the lines of the program
artefacts.py  the output of the target's tools for each kernel
lines.py      the line of the source of each line of an artefact
remedies.py   changes that would allow a refused fusion
"""

from fusion.inspect.document.artefacts import artefacts_of
from fusion.inspect.document.build import Finding, document_of
from fusion.inspect.document.structure import VERSION, Document

__all__ = ["VERSION", "Document", "Finding", "artefacts_of", "document_of"]
