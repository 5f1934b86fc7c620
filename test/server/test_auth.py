"""`--api-key` and `--admin-api-key` hold, whatever the request looks like."""

import socket
from collections.abc import Iterator

import pytest
import requests
from support.live_server import LiveServer, live_server

pytestmark = pytest.mark.multiproc

KEY, ADMIN_KEY = "secret-key", "secret-admin-key"
BEARER = f"Authorization: Bearer {KEY}".encode()


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live_server("--pp", "2", "--api-key", KEY, "--admin-api-key", ADMIN_KEY) as server:
        yield server


def status_of(server: LiveServer, request_line: bytes, *headers: bytes) -> int:
    """Sends bytes that no HTTP library would; the status of the answer."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as client:
        lines = (request_line, *headers, b"Connection: close", b"", b"")
        client.sendall(b"\r\n".join(lines))
        with client.makefile("rb") as answer:
            return int(answer.readline().split()[1])


# Each alone must not open the door.
NO_KEY = {
    "none": [],
    "an empty header": [b"Authorization: "],
    "no scheme": [b"Authorization: secret-key"],
    "another scheme": [b"Authorization: Basic secret-key"],
    "an empty key": [b"Authorization: Bearer "],
    "the beginning of the key": [b"Authorization: Bearer secret-ke"],
    "more than the key": [b"Authorization: Bearer secret-keyy"],
    "another case": [b"Authorization: Bearer SECRET-KEY"],
    "two spaces": [b"Authorization: Bearer  secret-key"],
    "a tab": [b"Authorization: Bearer\tsecret-key"],
    "the key twice": [b"Authorization: Bearer secret-key secret-key"],
    "a list of keys": [b"Authorization: Bearer x, Bearer secret-key"],
    "the right key second": [b"Authorization: Bearer x", BEARER],
    "not ASCII": ["Authorization: Bearer sécret-key".encode()],
    "Latin-1": ["Authorization: Bearer sécret-key".encode("latin-1")],
    "very long": [b"Authorization: Bearer " + b"x" * 30_000],
    "the admin's key": [b"Authorization: Bearer secret-admin-key"],
    "another header": [b"X-Api-Key: secret-key", b"Api-Key: secret-key"],
    "a proxy's header": [b"Proxy-Authorization: Bearer secret-key"],
    "a cookie": [b"Cookie: Authorization=Bearer secret-key"],
}
HOSTS = {
    "a path": b"Host: a/health?",
    "a path and a fragment": b"Host: a/health#",
    "a user": b"Host: health@a",
    "a backslash": b"Host: a\\health",
    "not ASCII": "Host: é/health?".encode(),
    "a port that is none": b"Host: a:health",
    "brackets": b"Host: [::1/health?",
    "empty": b"Host: ",
    "very long": b"Host: " + b"a" * 20_000,
}


@pytest.mark.parametrize("name", NO_KEY)
def test_without_the_key_nothing_is_served(server: LiveServer, name: str) -> None:
    assert status_of(server, b"GET /v1/models HTTP/1.1", b"Host: a", *NO_KEY[name]) in (400, 401)


@pytest.mark.parametrize("name", HOSTS)
def test_no_host_header_opens_a_route(server: LiveServer, name: str) -> None:
    assert status_of(server, b"GET /v1/models HTTP/1.1", HOSTS[name]) in (400, 401)


def test_two_host_headers_open_no_route(server: LiveServer) -> None:
    hosts = (b"Host: a", b"Host: a/health?")
    assert status_of(server, b"GET /v1/models HTTP/1.1", *hosts) in (400, 401)
    assert status_of(server, b"GET /v1/models HTTP/1.1") in (400, 401)


@pytest.mark.parametrize(
    "target",
    [
        *("//v1/models", "/v1//models", "/./v1/models", "/v1/../generate", "/health/../v1/models"),
        *("/%2e/v1/models", "/health/%2e%2e/v1/models", "/v1%2fmodels", "/%76%31/models"),
        *("/v1/models;/health", "/v1/models?/health", "/v1/models#/health", "/V1/models"),
        *("http://a/v1/models", "http://a/health/../v1/models", "http://health/v1/models"),
        *("/health%00/v1/models", "/health\\..\\v1\\models", "/healthy/../server_info", "*"),
        *("/server_info", "/get_model_info", "/flush_cache", "/docs", "/openapi.json", "/"),
    ],
)
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "PUT", "DELETE", "get", "WIBBLE"])
def test_no_path_is_a_way_round_the_key(server: LiveServer, method: str, target: str) -> None:
    request_line = f"{method} {target} HTTP/1.1".encode()
    assert status_of(server, request_line, b"Host: a", b"Content-Length: 0") in (
        *(400, 401),
        # A path below /health needs no key, and is no route.
        *((404,) if "/health" in target else ()),
    )


def test_options_tells_nothing_of_a_route(server: LiveServer) -> None:
    reply = requests.options(f"{server.url}/v1/models", timeout=30)
    assert reply.status_code == 405 and "sgl-pipeline-demo" not in reply.text
    headers = {"Origin": "http://a", "Access-Control-Request-Method": "POST"}
    reply = requests.options(f"{server.url}/generate", headers=headers, timeout=30)
    assert reply.status_code == 200 and reply.text == "OK"


@pytest.mark.parametrize("path", ["/v1/realtime", "/v1/models", "/generate"])
def test_a_websocket_is_not_opened(server: LiveServer, path: str) -> None:
    upgrade = (
        *(b"Host: a", b"Connection: Upgrade", b"Upgrade: websocket"),
        *(b"Sec-WebSocket-Version: 13", b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="),
    )
    assert status_of(server, f"GET {path} HTTP/1.1".encode(), *upgrade) in (400, 401, 403)


def test_the_key_opens_the_door_and_the_scheme_may_be_written_small(server: LiveServer) -> None:
    for header in (BEARER, BEARER.replace(b"Bearer", b"bearer"), BEARER + b" "):
        assert status_of(server, b"GET /v1/models HTTP/1.1", b"Host: a", header) == 200


def test_health_needs_no_key(server: LiveServer) -> None:
    assert requests.get(f"{server.url}/health", timeout=30).status_code == 200


def test_what_is_the_admins_needs_the_admins_key(server: LiveServer) -> None:
    def flush(key: str) -> int:
        headers = {"Authorization": f"Bearer {key}"}
        return requests.post(f"{server.url}/flush_cache", headers=headers, timeout=30).status_code

    assert flush(KEY) == 401
    assert flush(ADMIN_KEY) == 200


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_the_layer_split_is_the_admins(server: LiveServer, method: str) -> None:
    def status(*headers: bytes) -> int:
        body = (b"Host: a", b"Content-Type: application/json", b"Content-Length: 0")
        return status_of(server, f"{method} /pipeline/plan HTTP/1.1".encode(), *body, *headers)

    assert status() == status(BEARER) == 401
    # An empty body is a 400 once the door is open.
    admin = f"Authorization: Bearer {ADMIN_KEY}".encode()
    assert status(admin) == (200 if method == "GET" else 400)


def test_the_page_loads_without_a_key_and_what_it_shows_does_not(server: LiveServer) -> None:
    def status(path: str, *headers: bytes) -> int:
        return status_of(server, f"GET {path} HTTP/1.1".encode(), b"Host: a", *headers)

    assert status("/ui/") == status("/ui/app.js") == 200
    assert status("/", b"Accept: text/html") == 307
    for path in ("/ui/../pipeline/events", "/ui/%2e%2e/v1/models", "/ui/../v1/models"):
        assert status(path) in (401, 404), path
    admin = f"Authorization: Bearer {ADMIN_KEY}".encode()
    assert status("/pipeline/events") == status("/pipeline/events", admin) == 401
    assert status("/pipeline/events", BEARER) == 200
