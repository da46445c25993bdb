"""Builds the entry of a certificate in the document of a report."""

from __future__ import annotations

import math

from fusion.inspect.certificate import Certificate
from fusion.inspect.document.structure import CertificateEntry, CertifiedEntry, CheckEntry, ValueEntry


def certificate_entry(certificate: Certificate) -> CertificateEntry:
    """Return a certificate as plain data."""
    agreement = certificate.agreement
    launches = [
        CertifiedEntry(
            kernel=each.own.kernel,
            tensor=each.own.tensor,
            origins=list(each.own.origins),
            error=_finite(each.own.error),
            rounding=_finite(each.own.rounding),
            right=each.own.is_right,
            contribution=_finite(each.contribution),
            result=each.result,
        )
        for each in certificate.launches
    ]
    checks = [
        CheckEntry(
            name=check.name,
            origins=list(check.origins),
            tried=list(check.tried),
            faults=list(map(str, check.faults)),
            reason=check.reason,
        )
        for check in certificate.checks
    ]
    values = [ValueEntry(name=each.name, agrees=each.agrees, text=str(each)) for each in agreement.values]
    return CertificateEntry(
        holds=certificate.holds, values=values, note=agreement.note, launches=launches, checks=checks
    )


def _finite(number: float) -> float | None:
    """Return a number as JSON has it: None for infinity."""
    return number if math.isfinite(number) else None
