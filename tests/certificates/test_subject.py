"""What a certificate is about: arguments, fingerprints, files."""

from __future__ import annotations

import copy
import json
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import wball
from certificates.test_certify import dense_net, images
from wball.certificates import CertificateResult, certify, verify
from wball.certificates.complete import Leaf
from wball.certificates.subject import subject_of
from wball.storage.files import read_tensors, write_tensors

Case = tuple[nn.Module, Tensor, Tensor, wball.WassersteinBall, CertificateResult]


@pytest.fixture(scope="module")
def case() -> Case:
    net, x = dense_net(1, 3, (8, 6), 3, 3), images(2, 1, 3, 3)
    y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
    return net, x, y, ball, certify(net, x, y, ball)


def test_a_certificate_of_something_else_is_refused_by_name(case: Case, tmp_path: Path) -> None:
    net, x, y, ball, proof = case
    proof.save(tmp_path / "c.safetensors")
    loaded = CertificateResult.load(tmp_path / "c.safetensors")
    assert loaded.subject == proof.subject
    other = copy.deepcopy(net)
    with torch.no_grad():
        next(other.parameters())[0, 0] += 1e-3
    for found in (proof, loaded):
        assert torch.equal(verify(net, x, y, ball, found).confirmed, proof.certified)
        for given, name in (
            ((other, x, y, ball), "program"),
            ((net, x.flip(0), y, ball), "images"),
            ((net, x, (y + 1) % 3, ball), "labels"),
            ((net, x, y, ball.at(0.31)), "ball"),
            ((net, x, y, replace(ball, mass="absolute")), "ball"),
            ((other, x, y, ball.at(0.2)), "program and other ball"),
        ):
            with pytest.raises(ValueError, match=f"of another {name}:"):
                verify(*given, found)
    with pytest.raises(ValueError, match="another program"):
        verify(net, x, y, ball, replace(proof, subject={}))
    same = [subject_of(None, x, y, ball.at(eps)) for eps in (0.5, torch.full((2,), 0.5))]
    assert same[0] == same[1]


@pytest.mark.parametrize("plans", ["FULL", "Full", None, 7, True, ("full",), ["full"]])
def test_plans_are_one_of_two_words(case: Case, plans: Any) -> None:
    """Anything but ``full`` was checked as a claim about the window alone."""
    net, x, y, ball, proof = case
    with pytest.raises(ValueError, match="plans must be"):
        verify(net, x, y, ball, replace(proof, plans=plans))
    with pytest.raises(ValueError, match="plans must be"):
        certify(net, x, y, ball, "crown", plans)


@pytest.mark.parametrize(
    ("labels", "error"),
    [
        (torch.tensor([0, 3]), ValueError),
        (torch.tensor([-1, 0]), ValueError),
        (torch.tensor([0.5, 1.0]), TypeError),
        (torch.tensor([True, False]), TypeError),
        (torch.tensor([[0], [1]]), ValueError),
        (torch.tensor([0]), ValueError),
        ([0, 1], TypeError),
    ],
)
def test_labels_are_checked_alike(case: Case, labels: Any, error: type[Exception]) -> None:
    net, x, _, ball, proof = case
    for call in (
        lambda: certify(net, x, labels, ball, "crown"),
        lambda: verify(net, x, labels, ball, proof),
    ):
        with pytest.raises(error, match=r"^y "):
            call()


def _mutated(value: Any, draw: random.Random) -> Any:
    """A copy of plain data with one part replaced, removed or doubled."""
    if isinstance(value, dict) and value and draw.random() < 0.9:
        found, key = dict(value), draw.choice(list(value))
        if draw.random() < 0.15:
            del found[key]
        elif draw.random() < 0.1:
            found[f"{key}2"] = found[key]
        else:
            found[key] = _mutated(value[key], draw)
        return found
    if isinstance(value, (list, tuple)) and value and draw.random() < 0.9:
        row, k = list(value), draw.randrange(len(value))
        if draw.random() < 0.15:
            del row[k]
        elif draw.random() < 0.15:
            row.append(row[k])
        else:
            row[k] = _mutated(row[k], draw)
        return row
    odd = [None, True, -1, 0, 3, 10**30, 0.5, float("nan"), float("inf"), "", "full", "\u0000",
           "CERTIFIED", [], [[]], [None], {}, {"a": 1}, "relu", "0" * 64]  # fmt: skip
    return draw.choice(odd)


def _odd_tensors(tensors: dict[str, Tensor], draw: random.Random) -> dict[str, Tensor]:
    found, name = dict(tensors), draw.choice(list(tensors))
    value = found[name]
    changed = [
        value[..., :-1], value.bool(), value.double(), value[None], value.double() * float("nan"),
        value.long(), value.new_zeros(0), value.flatten()[:1].squeeze(), torch.cat([value, value]),
    ]  # fmt: skip
    found[name] = draw.choice(changed)
    if draw.random() < 0.3:
        odd = ["0.0/slopes", "9.0/slopes.relu", "0.x/slopes.relu", "/", "a", "0.0/box.1", "margin"]
        found[draw.choice([*odd, f"0.0/slopes.{draw.choice(['none', 'relu', '7'])}"])] = found.pop(
            name
        )
    return found


def test_files_with_odd_content_give_one_clear_error(case: Case, tmp_path: Path) -> None:
    """Their checksums are right. Whatever is read must be usable, too."""
    net, x, y, ball, proof = case
    path = tmp_path / "c.safetensors"
    units = {"relu": torch.rand(8), "relu_1": torch.rand(6)}
    splits = (("relu", 3, 1), ("relu_1", 0, -1))
    leaf = Leaf((int(y[0]) + 1) % 3, splits, (0.5, 0.25), units, units, torch.rand(9))
    replace(proof, leaves=((leaf, leaf), None)).save(path)
    tensors, notes = read_tensors(path)
    wide = ball.at(0.3)  # not provable without leaves
    claim: dict[str, Any] = {"certified": torch.ones(2, dtype=torch.bool)}
    claim["subject"] = certify(net, x, y, wide, "crown").subject
    draw, refused, read = random.Random(0), 0, 0
    for k in range(400):
        odd = _odd_tensors(tensors, draw) if k % 3 == 0 else tensors
        plain = _mutated(notes, draw) if k % 3 else notes
        write_tensors(path, odd, plain)
        try:
            found = CertificateResult.load(path)
        except ValueError as error:
            said = str(error)
            refused += str(path) in said and len(said) < 400
            continue
        read += 1
        assert len(found.to_dict()["images"]) == 2 and repr(found)
        if read % 10 == 1:
            forged = replace(found, **claim)
            assert len(verify(net, x, y, wide, forged, time_limit=1.0).status) == 2
    assert refused > 200 and read > 10 and refused + read == 400


SCRIPT = """
import sys, json, torch, wball
sys.path.insert(0, sys.argv[1])
from certificates.test_certify import dense_net, images
net, x = dense_net(1, 3, (8, 6), 3, 3), images(2, 1, 3, 3)
y, ball = net(x).argmax(1), wball.WassersteinBall(0.05)
given = net if len(sys.argv) == 2 else torch.export.load(sys.argv[2])
print(json.dumps(wball.certify(given, x, y, ball, "crown").subject))
"""


def test_fingerprints_are_the_same_in_every_process_and_from_a_file(
    case: Case, tmp_path: Path
) -> None:
    net, x, y, ball, proof = case
    assert proof.program is not None
    proof.program.save(tmp_path / "net.pt2")
    torch.testing.assert_close(proof.program(x), net(x))
    found = []
    for seed, more in (("1", []), ("2", [str(tmp_path / "net.pt2")])):
        root = Path(__file__).parents[1]
        line = [sys.executable, "-c", SCRIPT, str(root), *more]
        paths = os.pathsep.join([str(root.parent / "src"), os.environ.get("PYTHONPATH", "")])
        env = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": paths}
        out = subprocess.run(line, env=env, capture_output=True, text=True, check=True).stdout
        found.append(json.loads(out.splitlines()[-1]))
    here = certify(net, x, y, wball.WassersteinBall(0.05), "crown")
    assert found[0] == found[1] == here.subject
    assert torch.equal(verify(proof.program, x, y, ball, proof).confirmed, proof.certified)
