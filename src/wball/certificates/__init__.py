"""Certificates: proofs that no image of a ball changes a model's answer.

:func:`certify` and :func:`certified_radius` are deterministic and hold without exception;
:class:`FlowSmoothing` certifies a smoothed classifier with a stated probability.
"""

from wball.certificates.certificate import (
    CertificateResult,
    CertificateStatus,
    certified_radius,
    certify,
)
from wball.certificates.checking import VerificationResult, VerificationStatus, verify
from wball.certificates.operators import register
from wball.certificates.program import Program, UnsupportedModule
from wball.certificates.smoothing import FlowSmoothing, SmoothingResult, flow_noise

__all__ = [
    "CertificateResult",
    "CertificateStatus",
    "FlowSmoothing",
    "Program",
    "SmoothingResult",
    "UnsupportedModule",
    "VerificationResult",
    "VerificationStatus",
    "certified_radius",
    "certify",
    "flow_noise",
    "register",
    "verify",
]
