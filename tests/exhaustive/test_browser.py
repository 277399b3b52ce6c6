"""Web pages in a headless Chromium, and nginx in front: who reaches a server without keys."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import httpx
import pytest
from serving import Served, tiny

Tries = Sequence[tuple[str, dict[str, object]]]
EVIL, OWN = "evil.example", "llm.example"
BODY = json.dumps({"prompt": "a", "n_predict": 1})
PAGE = """<body><script>
const tries = %s;
const found = [];
(async () => {
    for (const [url, options] of tries) {
        try {
            const response = await fetch(url, options);
            found.push([response.status, response.type, (await response.text()).length]);
        } catch (error) {
            found.push(["blocked", String(error), 0]);
        }
    }
    document.body.textContent = "found " + JSON.stringify(found) + " end";
})();
</script></body>"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    found = tiny("-c", "512", "--allowed-hosts", OWN)
    yield found
    found.close()


@contextlib.contextmanager
def page(tries: Tries) -> Iterator[int]:
    """Serves a page that sends requests; yields its port."""
    text = (PAGE % json.dumps(tries)).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server.server_port
    server.shutdown()
    server.server_close()


def browse(
    host: str, tries: list[tuple[str, dict[str, object]]], folder: Path
) -> list[list[object]]:
    """Returns status, type and length of each response, or "blocked", that a page of `host` saw."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("chromium is not installed")
    with page(tries) as port:
        done = subprocess.run(
            [
                *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"),
                *(f"--user-data-dir={folder}", "--virtual-time-budget=20000"),
                "--host-resolver-rules=MAP *.example 127.0.0.1",
                f"http://{host}:{port}/",
            ],
            capture_output=True,
            text=True,
            timeout=120,
        )
    found = re.search(r"found (\[.*\]) end", done.stdout)
    assert found is not None, done.stdout + done.stderr[-2000:]
    return json.loads(found[1])


def post(kind: str, **more: object) -> dict[str, object]:
    return {"method": "POST", "body": BODY, "headers": {"Content-Type": kind}, **more}


def test_a_page_of_another_site_gets_nothing(served: Served, tmp_path: Path) -> None:
    local, rebound = f"http://127.0.0.1:{served.port}", f"http://{EVIL}:{served.port}"
    n_lines = len(served.log.splitlines())
    found = browse(
        EVIL,
        [
            (f"{local}/completion", post("text/plain", mode="no-cors")),
            (f"{local}/completion", post("application/json")),
            (f"{local}/v1/models", {}),
            (f"{rebound}/v1/models", {}),
            (f"{rebound}/completion", post("application/json")),
        ],
        tmp_path,
    )
    assert [one[0] for one in found] == [0, "blocked", "blocked", "blocked", "blocked"]
    log = "\n".join(served.log.splitlines()[n_lines:])
    assert not re.search(r"POST \S+ 200", log)
    assert len(re.findall(r"POST /completion 403", log)) >= 1


def test_pages_of_this_machine_read_answers(served: Served, tmp_path: Path) -> None:
    local = f"http://127.0.0.1:{served.port}"
    found = browse(
        "localhost",
        [(f"{local}/completion", post("application/json")), (f"{local}/v1/models", {})],
        tmp_path,
    )
    assert [one[0] for one in found] == [200, 200]
    assert all(int(str(one[2])) > 100 for one in found)


@pytest.mark.parametrize(
    ("headers", "statuses"),
    [
        ("proxy_set_header Host $host:$server_port;", (200, 200, 403)),
        ("", (200, 403, 403)),
    ],
)
def test_behind_nginx(
    served: Served, headers: str, statuses: tuple[int, ...], tmp_path: Path
) -> None:
    """Programs, the proxy's own pages, which need its Host, and pages of others."""
    nginx = shutil.which("nginx")
    if nginx is None:
        pytest.skip("nginx is not installed")
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = tmp_path / "nginx.conf"
    config.write_text(
        f"pid {tmp_path}/pid; error_log {tmp_path}/error.log; daemon off; events {{}}\n"
        f"http {{ access_log off; server {{ listen 127.0.0.1:{port}; location / {{\n"
        f"proxy_pass http://127.0.0.1:{served.port}; {headers} }} }} }}\n"
    )
    process = subprocess.Popen([nginx, "-c", str(config), "-p", str(tmp_path)])
    try:
        own, other = f"http://{OWN}:{port}", "http://evil.example"
        asked = []
        for origin in ({}, {"Origin": own}, {"Origin": other}):
            send = {"Host": f"{OWN}:{port}", "Content-Type": "application/json", **origin}
            for _ in range(100):
                with contextlib.suppress(httpx.ConnectError):
                    url = f"http://127.0.0.1:{port}/completion"
                    asked.append(httpx.post(url, content=BODY, headers=send).status_code)
                    break
                threading.Event().wait(0.05)
        assert tuple(asked) == statuses
    finally:
        process.terminate()
        process.wait()
