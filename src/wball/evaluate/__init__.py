"""Evaluations: how robust a model is, as data that can be checked, resumed, compared and shown."""

from wball.evaluate.result import CurvePoint, Evaluation, load_evaluation
from wball.evaluate.run import OtherSettings, evaluate
from wball.whole import FolderInUse

__all__ = ["CurvePoint", "Evaluation", "FolderInUse", "OtherSettings", "evaluate", "load_evaluation"]
