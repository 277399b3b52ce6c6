"""Requests of web pages: which a server without API keys takes, by their headers."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from dflash_gguf.serve.pages import PageChecks

HOSTS = ("llm.example.org", "My-Box.lan")


def refusal(method: str = "POST", origins: tuple[str, ...] = ("localhost",), **headers: str) -> str:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return PageChecks(origins, HOSTS).refusal(method, Headers(named)) or ""


@pytest.mark.parametrize(
    "host",
    [
        "localhost:8080",
        "127.0.0.1:8080",
        "192.168.1.20",
        "[::1]:8080",
        "[fe80::1]",
        "dflash",  # the name of a Docker service
        "dflash:8080",
        "box.local",
        "api.localhost:3000",
        "host.docker.internal:8080",
        "llm.example.org",
        "LLM.example.org.:443",
        "my-box.lan",
        "",  # a Unix socket's client may send none
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
def test_names_of_this_server(host: str, method: str) -> None:
    assert refusal(method, host=host) == ""


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:8080",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "evil.example.",
        "local.",
        "0x7f.1",
        "[evil.example]:8080",
        "user@evil.example",
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "DELETE"])
def test_names_that_a_page_gave_to_this_machine(host: str, method: str) -> None:
    sentence = refusal(method, host=host)
    if host == "local.":  # a name without dots, which search domains complete
        assert sentence == ""
    else:
        assert "--allowed-hosts" in sentence and host in sentence


def test_any_host() -> None:
    assert PageChecks((), ("*",)).refusal("POST", Headers({"host": "evil.example"})) is None


@pytest.mark.parametrize(
    "origin",
    [
        "http://localhost:3000",
        "https://127.0.0.1",
        "http://[::1]:5173",
        "http://tauri.localhost",
        "tauri://localhost",
        "app://obsidian.md",
        "vscode-webview://1a2b3c",
        "vscode-file://vscode-app",
        "http://127.9.9.9:1",
    ],
)
def test_pages_of_this_machine(origin: str) -> None:
    assert refusal(host="localhost", origin=origin, sec_fetch_site="cross-site") == ""
    assert refusal(host="localhost", origin=origin) == ""
    assert refusal(host="localhost", origin=origin, origins=()) != ""


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example", "sec_fetch_site": "cross-site"},
        {"origin": "https://evil.example"},
        {"origin": "null", "sec_fetch_site": "cross-site"},  # a sandboxed frame, a local file
        {"origin": "null"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"origin": "http://localhost.evil.example"},
        {"origin": "http://evil.example/localhost"},
        {"origin": "ftp://localhost"},
        {"origin": "http://["},
        {"origin": "http://192.168.1.7"},
        {"origin": "chrome-extension://abc", "sec_fetch_site": "none-such"},
    ],
)
@pytest.mark.parametrize("method", ["POST", "DELETE", "PUT"])
def test_pages_of_other_sites(headers: dict[str, str], method: str) -> None:
    assert "--cors-origins" in refusal(method, host="localhost:8080", **headers)


def test_get_requests_of_pages() -> None:
    """The browser keeps the answer from the page, and a GET changes nothing."""
    assert refusal("GET", host="localhost", origin="https://evil.example") == ""


@pytest.mark.parametrize(
    "headers",
    [
        {},  # a program
        {"sec_fetch_site": "same-origin", "origin": "https://llm.example.org"},
        {"sec_fetch_site": "none"},
        {"origin": "http://llm.example.org"},  # nginx passes Host; plain HTTP has no Sec-Fetch-Site
        {"origin": "http://LLM.example.org"},
    ],
)
def test_pages_of_the_same_origin(headers: dict[str, str]) -> None:
    assert refusal(host="llm.example.org", **headers) == ""


def test_named_origins() -> None:
    origins = ("https://chat.example.org", "null")
    for origin in origins:
        assert refusal(host="localhost", origins=origins, origin=origin) == ""
    assert refusal(host="localhost", origins=origins, origin="https://chat.example.org:8") != ""
    assert refusal(host="localhost", origins=origins, origin="http://localhost:3000") != ""
    assert refusal(host="localhost", origins=("*",), origin="https://evil.example") == ""
