#!/usr/bin/env bash
# Build the sdist and, from it, the wheel; install the wheel into an empty environment; run it from another folder.
#   tools/check_wheel.sh [python]        (needs `pip install build`; downloads torch unless pip finds it elsewhere)
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${1:-python3}")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

echo "== build"
"$python" -m build --outdir "$work/dist" "$root" > "$work/build.log" 2>&1 || { tail -20 "$work/build.log"; exit 1; }
sdist=$(ls "$work"/dist/*.tar.gz) wheel=$(ls "$work"/dist/*.whl)
mkdir -p "$root/dist" && cp "$sdist" "$wheel" "$root/dist/"
ls -l "$root/dist" | awk 'NR > 1 { print $5, $9 }'

echo "== contents"
"$python" - "$wheel" "$sdist" <<'PY'
import sys, tarfile, zipfile
names = zipfile.ZipFile(sys.argv[1]).namelist()
for wanted in ("wball/py.typed", "wball/zoo/mnist-standard.safetensors", "wball/zoo/mnist-standard.json"):
    assert wanted in names, f"{wanted} is not in the wheel"
stray = [n for n in names if not n.startswith(("wball/", "wball-"))]
assert not stray, f"the wheel would install {stray}"
assert not [n for n in names if "__pycache__" in n], "compiled files in the wheel"
inside = [n.split("/", 1)[1] for n in tarfile.open(sys.argv[2]).getnames() if "/" in n]
for wanted in ("LICENSE", "README.md", "CHANGELOG.md", "pyproject.toml", "Makefile", "tests/conftest.py", "docs/index.md"):
    assert wanted in inside, f"{wanted} is not in the sdist"
PY

echo "== empty environment, without extras"
"$python" -m venv "$work/env"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "$wheel"
mkdir "$work/elsewhere" && cd "$work/elsewhere"
unset PYTHONPATH
"$work/env/bin/python" - <<'PY'
import importlib.metadata, pathlib, sys
import wball
assert pathlib.Path(wball.__file__).is_relative_to(sys.prefix), wball.__file__
assert importlib.metadata.version("wball") == wball.__version__
x, y = wball.load_sample()
result = wball.evaluate(wball.load_model("mnist-standard"), x[:4], y[:4], wball.WassersteinBall(0.1), attack="fast")
assert not result.rejected
print(f"wball {wball.__version__} on Python {sys.version.split()[0]}: {result.verdict()}")
PY
"$work/env/bin/wball" --version

echo "== with the report"
"$work/env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$root/constraints.txt" "${wheel}[report]"
"$work/env/bin/python" -m wball.demo --limit 8 > demo.log || { cat demo.log; exit 1; }
test -s out/demo/report.html
tail -1 demo.log
echo "fine"
