"""The client commands against a server with TLS, and their error messages when TLS fails."""

import json
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.certificates import Authority, Files
from tests.cli.integration.test_commands import assert_refused, stepwell
from tests.cli.small_server import SmallServer, small_server


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture(scope="module")
def files(authority: Authority, tmp_path_factory: pytest.TempPathFactory) -> Files:
    return Files(tmp_path_factory.mktemp("tls")).write(authority.issue("127.0.0.1"), authority)


def context(files: Files, *, mutual: bool = False) -> ssl.SSLContext:
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    made.load_cert_chain(files.cert, files.key)
    if mutual:
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_verify_locations(files.ca)
    return made


@pytest.fixture
def server(files: Files) -> Iterator[SmallServer]:
    with small_server(tls=context(files)) as running:
        yield running


def complete(url: str, *flags: str) -> subprocess.CompletedProcess[str]:
    return stepwell("complete", "a b", "--url", url, *flags)


def test_a_server_of_a_trusted_authority_answers(server: SmallServer, files: Files) -> None:
    done = complete(server.url, "--ca-file", str(files.ca))
    assert (done.stdout, done.stderr, done.returncode) == ("a.b.\n", "", 0)


def test_a_load_is_sent_with_the_certificates(files: Files, tmp_path: Path) -> None:
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "a b"}) + "\n")
    shown = ("--cert-file", str(files.cert), "--key-file", str(files.key))
    with small_server(tls=context(files, mutual=True)) as server:
        done = stepwell(
            *("bench", "--url", server.url, "--ca-file", str(files.ca), *shown),
            *("--dataset", str(tmp_path / "prompts.jsonl"), "--num-requests", "2"),
        )
    assert (done.stderr, done.returncode) == ("", 0)
    assert "2 completed, 0 failed" in done.stdout


def test_a_certificate_is_shown_to_a_server_that_asks_for_one(files: Files) -> None:
    shown = ("--cert-file", str(files.cert), "--key-file", str(files.key))
    with small_server(tls=context(files, mutual=True)) as server:
        done = complete(server.url, "--ca-file", str(files.ca), *shown)
        assert (done.stdout, done.stderr) == ("a.b.\n", "")
        done = complete(server.url, "--ca-file", str(files.ca))
    assert_refused(
        done,
        f"stepwell complete: no TLS with {server.url}: "
        "the server asks for a certificate; --cert-file names it",
    )


def test_a_server_of_an_unknown_authority_is_not_trusted(server: SmallServer) -> None:
    assert_refused(
        complete(server.url),
        f"stepwell complete: no TLS with {server.url}: "
        "the server's certificate is not trusted; --ca-file names its CA",
    )


def test_a_server_without_tls_is_named(files: Files) -> None:
    with small_server() as server:
        url = server.url.replace("http:", "https:")
        done = complete(url, "--ca-file", str(files.ca))
    assert_refused(
        done,
        f"stepwell complete: no TLS with {url}: the server does not speak TLS there; is it http://?",
    )


def test_files_that_cannot_be_used_are_named(files: Files) -> None:
    assert_refused(
        complete("https://127.0.0.1:1", "--ca-file", "/nowhere"),
        "stepwell complete: --ca-file /nowhere: no such file or directory",
        2,
    )
    assert_refused(
        complete("https://127.0.0.1:1", "--cert-file", str(files.cert)),
        "stepwell complete: --cert-file and --key-file need each other",
        2,
    )
