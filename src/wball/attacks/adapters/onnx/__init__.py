"""ONNX models: a feed-forward classifier from a file, as a PyTorch module that has gradients.

::

    model = wball.attacks.adapters.onnx.load("classifier.onnx")     # images to logits
    result = wball.StandardAttack(ball)(model, x, y)

The file's graph is run node by node with PyTorch's own functions, so that attacks (and training) can differentiate
through it, certificates can follow it, and it runs on any device. The table of operators is in
:mod:`~wball.attacks.adapters.onnx.table`; it is checked against the ONNX project's own tests of each operator. What is
not in it is named in the error, or runs without gradients in ONNX Runtime, where that is installed. Weights become
parameters of the module. Needs ``pip install wball[onnx]``.
"""

from wball.attacks.adapters.onnx.graph import Graph
from wball.attacks.adapters.onnx.model import ForwardOnly, OnnxModel, load
from wball.attacks.adapters.onnx.table import OPERATORS, operator_table

__all__ = ["OPERATORS", "ForwardOnly", "Graph", "OnnxModel", "load", "operator_table"]
