"""Evaluations: how robust a model is, as data that can be checked, resumed, compared and shown."""

from wball.evaluation.merge import merge_evaluations
from wball.evaluation.requirements import (
    Check,
    Comparison,
    Decision,
    Requirement,
    confidence_interval,
)
from wball.evaluation.result import (
    CurvePoint,
    Evaluation,
    EvaluationWarning,
    exit_code,
    load_evaluation,
)
from wball.evaluation.run import OtherSettings, evaluate
from wball.storage.files import FolderInUse

__all__ = [
    "Check",
    "Comparison",
    "CurvePoint",
    "Decision",
    "Evaluation",
    "EvaluationWarning",
    "FolderInUse",
    "OtherSettings",
    "Requirement",
    "confidence_interval",
    "evaluate",
    "exit_code",
    "load_evaluation",
    "merge_evaluations",
]
