"""Operators against the ONNX project's own node tests, and their gradients against finite
differences.

The node tests come with the ``onnx`` package. Making them takes most of the time here, so one test
goes through all.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper

from wball.attacks.adapters.onnx import OPERATORS, OnnxGraph

STEPPED = {"Ceil", "Floor", "Round", "Sign", "Shape"}
"""Operators whose result does not depend on their input smoothly."""
CONSTANT = {"mean", "var", "min", "max", "value"}
"""Inputs without a gradient: statistics of a batch normalisation, ends of Clip, and the value of
Pad."""
LARGE = 4000
"""Finite differences are taken of tests with no more numbers than that."""


def tensor(value: Any) -> Tensor:
    array = numpy_helper.to_array(value) if isinstance(value, TensorProto) else np.asarray(value)
    half = array.dtype.name == "bfloat16"
    return torch.from_numpy(np.array(array, np.float32) if half else array.copy()).to(
        torch.bfloat16 if half else None
    )


def close(found: Tensor, expected: Tensor, case: Any) -> None:
    assert found.dtype == expected.dtype and found.shape == expected.shape, case.name
    # Half precision rounds after every step, and steps may be taken in another order.
    half = found.dtype in (torch.float16, torch.bfloat16)
    rtol = max(case.rtol, 4 * torch.finfo(found.dtype).eps if half else 0.0)
    torch.testing.assert_close(
        found,
        expected,
        rtol=rtol,
        atol=max(case.atol, 1e-6),
        equal_nan=True,
        msg=lambda text: f"{case.name}: {text}",
    )


def _beside(values: Tensor) -> Tensor:
    return 0.97 * values + 0.011 * torch.arange(values.numel(), dtype=values.dtype).cos().view(
        values.shape
    )


def check_gradient(graph: OnnxGraph, given: dict[str, Tensor]) -> bool:
    """Gradients of the first output by finite differences along a random direction; whether there
    was one to check."""
    # The tests like round numbers, where many functions have a kink.
    wide = {k: _beside(v.double()) if v.is_floating_point() else v for k, v in given.items()}
    names = [
        k for k, v in wide.items() if v.is_floating_point() and v.numel() and k not in CONSTANT
    ]
    if (
        not names
        or sum(wide[k].numel() for k in names) > LARGE
        or not all(bool(wide[k].isfinite().all()) for k in names)
    ):
        return False

    def run(*values: Tensor) -> Tensor:
        return graph.double()({**wide, **dict(zip(names, values, strict=True))})[0]

    values = [wide[k].clone().requires_grad_() for k in names]
    first = run(*values)
    if not first.requires_grad:
        return False
    slopes = torch.autograd.grad(first.sum(), values, allow_unused=True)
    if not all(slope is None or bool(slope.isfinite().all()) for slope in slopes):
        return False  # at the end of the domain, as of an inverse cosine
    return torch.autograd.gradcheck(
        run, values, fast_mode=True, atol=1e-4, rtol=1e-3, check_undefined_grad=False
    )


@pytest.mark.slow
def test_node_tests_of_the_onnx_project_and_gradients() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the tests' own making
        from onnx.backend.test.loader import load_model_tests

        cases = load_model_tests(kind="node")
    passed: Counter[str] = Counter()
    checked: set[str] = set()
    for case in cases:
        kinds = {node.op_type for node in case.model.graph.node}
        if "training" in case.name or "empty_set" in case.name:
            continue
        several = None if "Split" in kinds else [case.model.graph.output[0].name]
        try:
            graph = OnnxGraph(case.model.graph, case.model.opset_import[0].version, several)
        except ValueError:  # another operator, attribute or type
            continue
        for inputs, outputs in case.data_sets:
            given = {
                i.name: tensor(v)
                for i, v in zip(case.model.graph.input, inputs, strict=False)
                if v is not None
            }
            found = graph(given)
            for mine, theirs in zip(found, outputs, strict=False):
                close(mine, tensor(theirs), case)
        passed.update(kinds)
        (kind, *more) = kinds
        if (
            not more
            and kind not in checked
            and not kinds & STEPPED
            and check_gradient(graph, given)
        ):
            checked.add(kind)
    assert sum(passed.values()) > 1400
    assert {*OPERATORS} <= passed.keys()
    assert len(checked) >= 50 and checked >= {
        "Conv",
        "AveragePool",
        "HardSigmoid",
        "Pad",
        "Slice",
    }, sorted({*OPERATORS} - checked)


def graph(kind: str, opset: int = 21, **attributes: Any) -> OnnxGraph:
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in "xy"]
    return OnnxGraph(
        helper.make_graph(
            [helper.make_node(kind, ["x"], ["y"], **attributes)], "one", ends[:1], ends[1:]
        ),
        opset,
    )


@pytest.mark.parametrize(
    ("kind", "attributes", "said"),
    [
        ("Relu", {"alpha": 0.3}, "attribute 'alpha' of Relu"),
        ("MaxPool", {"kernel_shape": [2, 2], "rounding": 1}, "attribute 'rounding' of MaxPool"),
        (
            "AveragePool",
            {"kernel_shape": [2, 2], "dilations": [2, 2]},
            "attribute 'dilations' of AveragePool",
        ),
        ("LSTM", {"hidden_size": 2}, "operator LSTM is not supported"),
        ("Cast", {"to": int(TensorProto.STRING)}, "Cast .* to an unsupported type"),
        ("BatchNormalization", {"training_mode": 1}, "is in training mode"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(
    kind: str, attributes: dict[str, Any], said: str
) -> None:
    with pytest.raises(ValueError, match=said):
        graph(kind, **attributes)
