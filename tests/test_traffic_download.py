"""Downloads from a server in this process: right, wrong, cut short, refused, interrupted; and the facts about files."""

from __future__ import annotations

import hashlib
import re
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from sensitivity import traffic
from sensitivity.errors import InputError, RunError
from sensitivity.traffic import download
from sensitivity.traffic.published import DATASETS, Published, identify

pooch = pytest.importorskip("pooch")
CONTENT = b"speeds " * 5000
WRONG = b"<html>Too many downloads</html>"
RIGHT_SUM = f"sha256:{hashlib.sha256(CONTENT).hexdigest()}"
WRONG_SUM = f"sha256:{hashlib.sha256(WRONG).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    """Serves by the name of the path."""

    def do_GET(self) -> None:
        self.server.asked.append(self.path)
        name = self.path.strip("/")
        if name == "refused":
            self.send_error(403)
            return
        content = WRONG if name == "wrong" else CONTENT
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2] if name == "short" else content)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[ThreadingHTTPServer]:
    found = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found.asked = []
    thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


def published(server: ThreadingHTTPServer, kind: str, name: str = "a.h5") -> Published:
    url = f"http://127.0.0.1:{server.server_address[1]}/{kind}"
    return Published(name, RIGHT_SUM, len(CONTENT), url, f"the {kind} place", "https://example.org/page")


def nothing_in(folder: Path) -> bool:
    return not folder.exists() or not list(folder.iterdir())


def test_a_right_file_is_kept(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (one,) = traffic.fetch("metr-la", tmp_path / "new" / "data", files=[[published(server, "right")]])
    assert (one.path, one.new, one.failures) == (tmp_path / "new" / "data" / "a.h5", True, ())
    assert one.path.read_bytes() == CONTENT
    assert list(one.path.parent.iterdir()) == [one.path]


def test_a_right_file_that_is_there_is_left_alone(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "b.csv").write_bytes(CONTENT)
    places = [published(server, "right"), published(server, "right", "b.csv")]
    (one,) = traffic.fetch("metr-la", tmp_path, files=[places])
    assert (one.path, one.new) == (tmp_path / "b.csv", False)
    assert server.asked == []


def test_another_file_of_that_name_is_not_touched(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    (tmp_path / "a.h5").write_bytes(WRONG)
    with pytest.raises(
        InputError, match=f"a.h5 is there already, but its checksum is {WRONG_SUM} instead of {RIGHT_SUM}"
    ):
        traffic.fetch("metr-la", tmp_path, files=[[published(server, "right")]])
    assert (tmp_path / "a.h5").read_bytes() == WRONG
    assert server.asked == []


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("wrong", rf"the wrong place served {WRONG_SUM} instead of {RIGHT_SUM}, 31 bytes instead of 35000"),
        ("short", "the short place (broke off|served sha256)"),
        ("refused", "the refused place answered 403"),
    ],
)
def test_what_is_not_right_is_not_kept(server: ThreadingHTTPServer, tmp_path: Path, kind: str, message: str) -> None:
    with pytest.raises(RunError, match=rf"a.h5 could not be fetched \({message}") as caught:
        traffic.fetch("metr-la", tmp_path / "data", files=[[published(server, kind)]])
    assert re.search(
        r"nothing was kept: download it with a browser from https://example.org/page to .*a.h5", str(caught.value)
    )
    assert nothing_in(tmp_path / "data")
    assert server.asked == [f"/{kind}"]


def test_the_next_place_is_tried(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    places = [published(server, kind, f"{kind}.h5") for kind in ("wrong", "refused", "right")]
    (one,) = traffic.fetch("metr-la", tmp_path, files=[places])
    assert one.path == tmp_path / "right.h5"
    assert [failure.split(" place ")[0] for failure in one.failures] == ["the wrong", "the refused"]
    assert list(tmp_path.iterdir()) == [one.path]


def test_other_algorithms(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    file = replace(published(server, "right"), checksum=f"md5:{hashlib.md5(CONTENT).hexdigest()}", size=None)
    assert traffic.fetch("pems-bay", tmp_path, files=[[file]])[0].new
    bad = replace(file, name="b.csv", checksum="md5:0")
    with pytest.raises(RunError, match=f"served {file.checksum} instead of md5:0\\), and nothing was kept"):
        traffic.fetch("pems-bay", tmp_path, files=[[bad]])


def test_no_network(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    file = Published("a.h5", RIGHT_SUM, None, f"http://127.0.0.1:{port}/", "nobody", "https://example.org/page")
    with pytest.raises(
        RunError, match=r"\(nobody cannot be reached, maybe for lack of a network\), and nothing was kept"
    ):
        traffic.fetch("metr-la", tmp_path / "data", files=[[file]])
    assert nothing_in(tmp_path / "data")


def test_a_silent_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "TIMEOUT", 0.05)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        file = Published("a.h5", RIGHT_SUM, None, url, "a silent place", "https://example.org/page")
        with pytest.raises(RunError, match=r"a silent place did not answer within 0.05 s"):
            traffic.fetch("metr-la", tmp_path, files=[[file]])
    assert nothing_in(tmp_path)


class Bar:
    """Counts what it is told, and interrupts if asked to."""

    def __init__(self, interrupt: bool = False) -> None:
        self.interrupt, self.total, self.done, self.closed = interrupt, 0, 0, False

    def update(self, size: int) -> None:
        if self.interrupt:
            raise KeyboardInterrupt
        self.done += size

    def reset(self) -> None:
        self.done = 0

    def close(self) -> None:
        self.closed = True


def test_progress(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    bar = Bar()
    traffic.fetch("metr-la", tmp_path, files=[[published(server, "right")]], progress=lambda file: bar)
    assert (bar.total, bar.done, bar.closed) == (len(CONTENT), len(CONTENT), True)


def test_an_interruption_leaves_nothing(server: ThreadingHTTPServer, tmp_path: Path) -> None:
    bar = Bar(interrupt=True)
    with pytest.raises(KeyboardInterrupt):
        traffic.fetch("metr-la", tmp_path, files=[[published(server, "right")]], progress=lambda file: bar)
    assert nothing_in(tmp_path)
    assert bar.closed


def test_certificates_are_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import requests

    asked: dict[str, object] = {}

    def get(url: str, **options: object) -> None:
        asked.update(options)
        raise requests.exceptions.SSLError("self-signed certificate")

    monkeypatch.setattr(requests, "get", get)
    file = Published("a.h5", RIGHT_SUM, None, "https://127.0.0.1/", "an impostor", "https://example.org/page")
    with pytest.raises(RunError, match=r"\(an impostor has no valid TLS certificate\)"):
        traffic.fetch("metr-la", tmp_path, files=[[file]])
    assert asked.get("verify", True) is True
    assert all(file.url.startswith("https://") for file in every_file())


def test_what_cannot_be_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="there is no dataset 'pems' to fetch; choose metr-la or pems-bay"):
        traffic.fetch("pems")
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InputError, match="is not a folder; choose another place with --to"):
        traffic.fetch("metr-la", tmp_path / "file")
    (tmp_path / "metr-la.h5").mkdir()
    with pytest.raises(InputError, match=r"metr-la.h5 is not a regular file; choose another folder with --to"):
        traffic.fetch("metr-la", tmp_path)
    with pytest.raises(InputError, match=r"cannot write to /proc/nowhere: .*; choose another folder"):
        traffic.fetch("metr-la", "/proc/nowhere")
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(InputError, match=r"needs pooch, which is not installed; run: pip install 'attention-sensi"):
        traffic.fetch("metr-la", tmp_path / "new")
    assert nothing_in(tmp_path / "new")


def every_file() -> list[Published]:
    return [file for data in DATASETS.values() for file in (*data.speeds, *data.graphs)]


def test_published_facts() -> None:
    metr_la, bay = DATASETS["metr-la"], DATASETS["pems-bay"]
    assert (metr_la.sensors, metr_la.rows, bay.sensors, bay.rows) == (207, 34272, 325, 52116)
    assert metr_la.rows == 119 * 288
    assert bay.rows == 181 * 288 - 12  # the hour that summer time skips
    assert metr_la.speeds[0].size == 57_038_056
    for file in every_file():
        algorithm, _, digest = file.checksum.partition(":")
        assert re.fullmatch(r"[0-9a-f]+", digest)
        assert len(digest) == 2 * hashlib.new(algorithm).digest_size
    digest = metr_la.speeds[0].checksum.removeprefix("sha256:")
    assert identify(digest) == ("METR-LA", metr_la.speeds[0])
    assert identify("0" * 64) is None
