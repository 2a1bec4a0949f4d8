"""ONNX models: a feed-forward classifier from a file, as a PyTorch module that has gradients.

::

    model = wball.attacks.adapters.onnx.load("classifier.onnx")     # images to logits
    result = wball.StandardAttack(ball)(model, x, y)

The graph runs node by node on PyTorch functions, so that attacks and training can differentiate
through it, certificates can follow it, and it runs on any device. ``OPERATORS`` lists the supported
operators, each tested against the node tests of the ONNX project. An error names what is not
supported; where ONNX Runtime is installed, such a graph runs there, without gradients. Weights
become parameters of the module. Needs ``pip install wball[onnx]``.
"""

from wball.attacks.adapters.onnx.graph import OnnxGraph
from wball.attacks.adapters.onnx.model import ForwardOnly, OnnxModel, load
from wball.attacks.adapters.onnx.table import OPERATORS

__all__ = ["OPERATORS", "ForwardOnly", "OnnxGraph", "OnnxModel", "load"]
