"""Certificates: proofs that no image of a ball changes a model's answer.

:func:`certify` and :func:`certified_radius` are deterministic and hold without exception.
"""

from wball.certify.certificate import CertificateResult, CertificateStatus, certified_radius, certify
from wball.certify.graph import UnsupportedModule

__all__ = ["CertificateResult", "CertificateStatus", "UnsupportedModule", "certified_radius", "certify"]
