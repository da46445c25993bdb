"""x"""

from fusion.inspect.document.structure import Document


def page_of(document: Document) -> str:
    return ""


def frame_of(page: str) -> str:
    return ""
