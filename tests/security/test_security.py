"""What ``SECURITY.md`` promises: nothing read is executed, nothing is fetched unasked, no string
becomes markup."""

from __future__ import annotations

import ast
import re
import socket
import stat
import warnings
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import wball

SOURCES = Path(wball.__file__).parent
MODULES = sorted(SOURCES.rglob("*.py"))


def calls(path: Path) -> Iterator[tuple[int, str, ast.Call]]:
    """Every call in a module, with its dotted name."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func), node


def unsafe(path: Path) -> list[str]:
    """Calls of a module that may execute what they read, and imports that would hide one."""
    text = path.read_text(encoding="utf-8")
    found = [
        f"{path.name}:{node.lineno} imports {alias.name} from {node.module}"
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if (node.module, alias.name) in HIDING or node.module in ("pickle", "marshal")
    ]
    for line, name, call in calls(path):
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        harmful = (
            name in ("eval", "exec", "__import__", "os.system", "os.popen", "tempfile.mktemp")
            or name.startswith(("pickle.", "dill.", "joblib.", "marshal.", "shelve.", "yaml."))
            or name.endswith((".extractall", ".extract"))
            or (name.endswith("torch.load") and given.get("weights_only") != "True")
            or (name in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False")
            or given.get("shell", "False") != "False"
        )
        if harmful:
            found.append(f"{path.name}:{line} calls {name}")
    return found


HIDING = {("torch", "load"), ("numpy", "load"), ("os", "system"), ("os", "popen")}


def test_nothing_read_from_outside_is_executed() -> None:
    assert len(MODULES) > 80 and not [line for path in MODULES for line in unsafe(path)]


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(p)", "torch.load(p, weights_only=False)", "np.load(p, allow_pickle=True)", "exec(text)",
        "pickle.loads(data)", "archive.extractall(p)", "subprocess.run(line, shell=True)", "from torch import load",
    ],
)  # fmt: skip
def test_what_executes_is_found(line: str, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text(line)
    assert len(unsafe(tmp_path / "some.py")) == 1


def test_nothing_is_unpickled() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        for used in re.findall(r"\bpickle\.(\w+)", text):
            harmless = ("PickleError", "UnpicklingError", "Pickler")
            assert used in harmless, f"{path.name} uses pickle.{used}"


def test_the_network_is_used_in_one_module() -> None:
    for path in MODULES:
        text = path.read_text(encoding="utf-8")
        if path.name != "fetch.py":
            assert not re.search(
                r"^\s*(import|from) (socket|urllib(?!\.parse)|http|requests|ftplib)\b",
                text,
                re.MULTILINE,
            ), path
    scripts = (SOURCES / "report" / "app.js").read_text(encoding="utf-8")
    scripts = scripts.replace("http://www.w3.org/2000/svg", "")  # the name of SVG, not an address
    assert not re.search(r"fetch\(|XMLHttpRequest|WebSocket|https?://", scripts)


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any, **more: Any) -> None:
        raise AssertionError("something asked for the network")

    for name in ("connect", "connect_ex", "sendto"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)


@pytest.mark.slow
@pytest.mark.usefixtures("no_network")
def test_an_evaluation_with_its_report_needs_no_network(tmp_path: Path) -> None:
    pytest.importorskip("jinja2")
    from wball import demo

    assert demo.main(["--limit", "3", "--out", str(tmp_path)]) == 0
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Elements()
    page.feed(text)
    linked = [
        value
        for _, given in page.found
        for name, value in given.items()
        if name in ("src", "href") and value
    ]
    assert all(value.startswith(("data:", "#")) for value in linked)


HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>'\"&{{7*7}}</script>"


class Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def test_every_string_of_the_user_is_text_in_the_report(tmp_path: Path) -> None:
    """Model, data, class and file names, the command, and reasons of rejected claims."""
    pytest.importorskip("jinja2")
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
    x = torch.rand(4, 1, 4, 4)
    y = model(x).argmax(1)
    ball = wball.WassersteinBall(0.5)
    result = wball.evaluate(
        model, x, y, ball, attack=wball.DualAveraging(ball, steps=3), out=tmp_path / "out",
        name=wball.Names(HOSTILE, HOSTILE, [HOSTILE, f"b{HOSTILE}"], command=HOSTILE),
    )  # fmt: skip
    folder = tmp_path / "<script>alert(3)<"
    text = wball.write_report(result, folder / "report.html").read_text(encoding="utf-8")
    assert HOSTILE not in text and "<script>alert" not in text
    page = Elements()
    page.feed(text)
    assert all(
        "onerror" not in attributes and "onload" not in attributes for _, attributes in page.found
    )
    assert all(attributes.get("src") != "x" for tag, attributes in page.found if tag == "img")
    assert "49" not in re.findall(
        r"\{\{7\*7\}\}|49(?=&lt;)", text
    )  # the template is not applied to what it shows
    assert sum(tag == "script" for tag, _ in page.found) == 2  # data and the page's own


class Payload:
    def __reduce__(self) -> tuple[Any, tuple[str, str]]:
        return open, (self.path, "w")

    path = ""


def test_a_checkpoint_with_code_in_it_is_refused(tmp_path: Path) -> None:
    Payload.path = str(tmp_path / "executed")
    torch.save({"state_dict": {"weight": torch.ones(2)}, "extra": Payload()}, tmp_path / "evil.pth")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(ValueError, match="contains pickled Python objects"):
            wball.load_weights(nn.Linear(2, 1, bias=False), tmp_path / "evil.pth")
    assert not (tmp_path / "executed").exists()


def test_written_files_have_usual_permissions(tmp_path: Path) -> None:
    """Readable as the umask says: neither more (executable, world-writable) nor less."""
    wball.save_weights(nn.Linear(2, 1), tmp_path / "w.safetensors")
    mode = stat.S_IMODE((tmp_path / "w.safetensors").stat().st_mode)
    plain = tmp_path / "plain"
    plain.touch()
    assert mode == stat.S_IMODE(plain.stat().st_mode) and not mode & 0o111
