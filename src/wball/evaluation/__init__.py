"""Evaluations: how robust a model is, as data that can be checked, resumed, compared and shown."""

from wball.evaluation.result import CurvePoint, Evaluation, load_evaluation
from wball.evaluation.run import OtherSettings, evaluate
from wball.storage.atomic import FolderInUse

__all__ = ["CurvePoint", "Evaluation", "FolderInUse", "OtherSettings", "evaluate", "load_evaluation"]
