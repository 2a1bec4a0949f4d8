"""What ``import wball`` needs, how long it takes, and that everything optional is optional."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch

import wball

ROOT = Path(__file__).parent.parent.parent

# Nothing but torch, numpy and safetensors: as if the others had never been installed.
BLOCKED = """
import sys
from importlib.machinery import PathFinder

class Blocked(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        absent = name.split(".")[0] in {blocked!r}
        return None if absent else PathFinder.find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Blocked
import warnings
warnings.simplefilter("ignore")
"""
OPTIONAL = (
    "typer", "click", "rich", "jinja2", "matplotlib", "PIL", "numba", "triton", "cvxpy", "art",
    "foolbox", "sklearn", "pandas", "tensorboard", "onnx", "torchvision",
)  # fmt: skip

CORE = """
import torch, wball
assert set(wball.__all__) <= set(dir(wball))
for name in wball.__all__:
    getattr(wball, name)
x, y = wball.load_sample("mnist")
x, y = x[:2], y[:2]
model = wball.load_model("mnist-standard")
ball = wball.WassersteinBall(0.1)
assert ball.project(x[:, :, ::4, ::4], torch.rand(2, 1, 7, 7), 100.0, max_iter=3).point.isfinite().all()
assert ball.support(x[:, :, ::4, ::4], torch.rand(2, 1, 7, 7)).point.isfinite().all()
found = wball.DualAveraging(ball, steps=2)(model, x, y)
report = wball.audit(ball, x[:1, :, 7:21, 7:21], ball.sample(x[:1, :, 7:21, 7:21]))
assert report.all_valid
small = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(49, 3))
few = x[:1, :, ::4, ::4]
wball.certify(small, few, small(few).argmax(1), wball.WassersteinBall(0.001))
import wball.demo
assert wball.demo.main() == 2
print("fine")
"""


def python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_core_works_without_anything_optional() -> None:
    """The command line and the demo say which package they want."""
    assert "fine" in python(BLOCKED.format(blocked=OPTIONAL) + CORE)


def test_import_is_quick_beyond_torch() -> None:
    """Under 2 s of processor time; measured 0.1 s. What is slow to import is imported when it is
    used, and documented modules resolve after ``import wball``."""
    code = (
        "import sys, time, torch\n"
        "begin = time.process_time()\n"
        "import wball\n"
        "assert 'wball.attacks' not in sys.modules\n"
        "assert wball.attacks.adapters.torchattacks.TorchAttack and wball.training.preset\n"
        "assert 'wball.attacks.adapters.art' not in sys.modules\n"
        "assert not hasattr(wball, 'nothing') and not hasattr(wball.attacks, 'nothing')\n"
        "assert not hasattr(wball.attacks.adapters, 'nothing') and callable(wball.audit)\n"
        "wball.WassersteinBall\n"
        "print(time.process_time() - begin)\n"
        "slow = {'numba', 'ot', 'scipy.optimize', 'triton', 'matplotlib', 'rich', 'typer'}\n"
        "assert not slow & set(sys.modules), slow & set(sys.modules)\n"
    )
    assert float(python(code)) < 2.0


def test_the_version_has_one_place() -> None:
    written = [
        path.relative_to(ROOT)
        for path in (ROOT / "pyproject.toml", *(ROOT / "src").rglob("*.py"))
        if f'"{wball.__version__}"' in path.read_text(encoding="utf-8")
    ]
    assert written == [Path("src/wball/__init__.py")]


def test_the_package_says_that_it_is_typed() -> None:
    assert (ROOT / "src" / "wball" / "py.typed").is_file()


@pytest.mark.parametrize("name", wball.__all__)
def test_public_names_are_documented(name: str) -> None:
    assert getattr(getattr(wball, name), "__doc__", None), name


def test_a_class_name_has_one_meaning() -> None:
    files = (ROOT / "src").rglob("*.py")
    names = [name for file in files for name in re.findall(r"^class (\w+)", file.read_text(), re.M)]
    assert len(names) == len(set(names)), sorted({n for n in names if names.count(n) > 1})


PRIVATE = {
    "torch._C._cuda_endAllocateToPool": "a recording that failed gives its memory back",
    "torch._C._cuda_releasePool": "a recording that failed gives its memory back",
    "torch._foreach_copy_": "averages of weights take few launches",
    "torch._foreach_lerp_": "averages of weights take few launches",
}


@pytest.mark.parametrize("name", PRIVATE)
def test_private_parts_of_torch_are_where_they_were(name: str) -> None:
    if "cuda" in name and torch.version.cuda is None:
        pytest.skip("torch without CUDA")
    assert resolve_name(name), PRIVATE[name]


def test_no_other_private_parts_of_torch_are_used() -> None:
    code = "\n".join(file.read_text() for file in (ROOT / "src").rglob("*.py"))
    used = set(re.findall(r"\btorch(?:\.\w+)*\._[a-zA-Z]\w*", code))
    assert all(any(name.startswith(part) for name in PRIVATE) for part in used), used
