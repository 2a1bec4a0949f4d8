#!/usr/bin/env bash
# Does the code use anything that the oldest supported torch and Python lack? Types are checked against torch's own
# sources (the wheel for another system serves as well, and is a tenth of the size), and for Python 3.10.
#   tools/check_oldest.sh [python] [torch version]
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
python=$(command -v "${1:-python3}") version=${2:-2.4.0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m pip download --quiet --disable-pip-version-check "torch==$version" --no-deps --only-binary=:all: \
    --python-version 3.10 --platform macosx_11_0_arm64 -d "$work" 2> "$work/log" || { tail -3 "$work/log"; exit 1; }
"$python" - "$work" <<'PY'
import pathlib, sys, zipfile
work = pathlib.Path(sys.argv[1])
with zipfile.ZipFile(next(work.glob("*.whl"))) as wheel:
    wheel.extractall(work / "old", [n for n in wheel.namelist() if n.endswith((".py", ".pyi", "py.typed"))])
PY
cd "$root"
MYPYPATH="$work/old" "$python" -m mypy --config-file pyproject.toml --cache-dir "$work/cache" --python-version 3.10 \
    --implicit-reexport --no-warn-unused-ignores --no-warn-redundant-casts src/wball > "$work/found" || true
tail -1 "$work/found" | grep -q "source files" || { tail -3 "$work/found"; exit 1; }
if grep '^src/' "$work/found"; then exit 1; fi
echo "nothing that torch $version or Python 3.10 lacks"
